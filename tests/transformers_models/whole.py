"""Tiny whole models and encoders, padded batches for them, and what a call must give."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import fullgraph_compile as fgc

OPTIONS: dict[str, Any] = {"buckets": [16, 48], "graphs": "tape", "compiler": "eager"}
VOCABULARY = 97
PAD = 1

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
}
_OWN: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8,
               "attn_implementation": "eager"},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Albert": {"embedding_size": 16},
}  # fmt: skip


def tiny(name: str, kind: str = "ForCausalLM", **changes: Any) -> Any:
    """A two-layer model in eval mode, fp32, by its config's name and what follows it in its class's name."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **_OWN.get(name, {}), **changes})
    torch.manual_seed(0)
    head = "LMHeadModel" if (name, kind) == ("GPT2", "ForCausalLM") else kind
    model = getattr(transformers, name + head)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            # At the usual scale of initialisation attention and positions hardly matter.
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1) + (0.0 if p.dim() > 1 else 1.0))
    return model


def pair(name: str, kind: str = "ForCausalLM", **changes: Any) -> tuple[Any, Any]:
    """A compiled model, and an untouched copy."""
    model = tiny(name, kind, **changes)
    eager = copy.deepcopy(model)
    assert fgc.compile(model, **OPTIONS) is model
    return model, eager


def padded(lengths: list[int], side: str = "right", seed: int = 1, width: int = 0) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` of a batch."""
    width = max([*lengths, width])
    ids, mask = torch.full((len(lengths), width), PAD), torch.zeros(len(lengths), width, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    for row, n in enumerate(lengths):
        at = slice(0, n) if side == "right" else slice(width - n, width)
        ids[row, at] = torch.randint(PAD + 1, VOCABULARY, (n,), generator=generator)
        mask[row, at] = 1
    return {"input_ids": ids, "attention_mask": mask}


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-5, atol=tolerance * max(1.0, float(want.abs().max())))


def rows_equal(got: Tensor, want: Tensor, mask: Tensor) -> None:
    """Equal where the mask is 1."""
    assert got.shape == want.shape
    close(got[mask.bool()], want[mask.bool()])


def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


def replays(model: Any) -> int:
    return sum(fgc.report(model).replays.values())


def fallbacks(model: Any) -> dict[fgc.Reason, int]:
    return dict(fgc.report(model).fallbacks)
