"""The calls that each architecture gets, and their outputs at the real tokens, by it and by eager.

Imports torch only where it needs it, as ``architectures.py`` does.
"""

from __future__ import annotations

from typing import Any

from tests.transformers_models.tiny_configs import VOCABULARY

# Kind of call and the requests' lengths; more than one request, windows overrun, one token, and both sides of padding.
CALLS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("right", (3, 7, 4)),
    ("packed", (5, 4)),
    ("packed", (11,)),
    ("left", (3, 7, 4)),
    ("dense", (5, 5)),
    ("packed", (7, 1, 3, 5)),
    ("right", (9, 1)),
    ("packed", (1,)),
    ("left", (2, 6)),
    ("packed", (12, 6, 2)),
    ("right", (1, 8, 2, 8)),
    ("dense", (17,)),
)


def without_cache(model: Any) -> dict[str, bool]:
    """Arguments that keep a model from making a KV cache."""
    import inspect

    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def with_decoder(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The call, and of a model that has an encoder beside its decoder the same tokens for that."""
    import inspect

    names = inspect.signature(model.forward).parameters
    if not getattr(model.config, "is_encoder_decoder", False) or "decoder_input_ids" not in names:
        return inputs
    decoder = {"decoder_input_ids": inputs["input_ids"]}
    if "attention_mask" in inputs and "decoder_attention_mask" in names:
        decoder["decoder_attention_mask"] = inputs["attention_mask"]
    return inputs | decoder


def rows_of(output: Any) -> Any:
    """The output that has a row for each token."""
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output[0]


def tokens_of(lengths: tuple[int, ...], kind: str, seed: int) -> dict[str, Any]:
    """The arguments of a padded or dense call; of a packed one, one row with all requests."""
    import torch

    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(4, VOCABULARY - 16, (n,), generator=g) for n in lengths]
    if kind == "packed":
        return {"input_ids": torch.cat(ids)[None]}
    if kind == "dense":
        return {"input_ids": torch.stack(ids)}
    width = max(lengths)
    padded, mask = torch.zeros(len(ids), width, dtype=torch.long), torch.zeros(len(ids), width, dtype=torch.long)
    for row, x in enumerate(ids):
        at = slice(0, len(x)) if kind == "right" else slice(width - len(x), width)
        padded[row, at], mask[row, at] = x, 1
    return {"input_ids": padded, "attention_mask": mask}


def expected(eager: Any, kind: str, lengths: tuple[int, ...], inputs: dict[str, Any], more: dict[str, Any]) -> Any:
    """Eager's rows at the real tokens: ``[tokens, width]``; packed requests are called one by one."""
    import torch

    if kind != "packed":
        return real(rows_of(eager(**inputs, **more)), inputs)
    alone = [with_decoder(eager, {"input_ids": x}) for x in inputs["input_ids"].split(list(lengths), 1)]
    return torch.cat([rows_of(eager(**x, **more))[0] for x in alone])


def real(rows: Any, inputs: dict[str, Any]) -> Any:
    """The rows at the real tokens: ``[tokens, width]``."""
    mask = inputs.get("attention_mask")
    return rows.flatten(0, 1) if mask is None else rows[mask.bool()]
