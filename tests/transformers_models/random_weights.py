"""A tiny model with random weights that show what a mask or a position changes, and whether it runs alone.

Imports torch only where it needs it, as ``architectures.py`` does.
"""

from __future__ import annotations

import math
from typing import Any

from tests.transformers_models.calls import rows_of, tokens_of, with_decoder, without_cache

EXPERTS = "batched_mm"


def with_weights(kind: Any, config: Any) -> Any:
    """A model of a class, in eval mode; attention, experts and cache of the config are set to what can be compared."""
    import torch

    capped = any(_softcap(c) for c in (config, getattr(config, "text_config", None)))
    if capped:
        # transformers' sdpa attention drops the cap without a word; only its eager attention is a reference.
        config._attn_implementation = "eager"
    for part in (config, getattr(config, "text_config", None)):
        # Not every forward has an argument for it.
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if kind._can_set_experts_implementation():
        # grouped_mm, the default, reads counts on the host where it is traced in fp32: no graph can repeat that.
        config._experts_implementation = EXPERTS
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point():
                continue
            if p.dim() > 1:
                # At the usual scale of initialisation attention and positions hardly matter.
                p.copy_(torch.randn_like(p) * min(0.3, 1.5 / math.sqrt(p.shape[-1])))
            elif name.endswith("bias"):
                p.copy_(torch.randn_like(p) * 0.1)
            elif name.endswith("weight"):
                p.copy_(torch.randn_like(p) * 0.1 + 1.0)
            else:
                p.add_(torch.randn_like(p) * 0.3)
    return model


def _softcap(config: Any) -> bool:
    return bool(getattr(config, "attn_logit_softcapping", None))


def first_call(model: Any) -> None:
    """One call by the model alone.

    Raises:
        ValueError: its output is not finite, or not a row for each token.
    """
    import torch

    with torch.no_grad():
        out = rows_of(model(**with_decoder(model, tokens_of((9,), "dense", 0)), **without_cache(model)))
    if out.dim() != 3 or out.shape[:2] != (1, 9):
        raise ValueError(f"its output has shape {list(out.shape)} for [1, 9] tokens")
    if not torch.isfinite(out).all():
        raise ValueError("its own output is not finite")
