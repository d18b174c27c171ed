"""What a transformers model means by a call, learned from small eager calls of its own.

A model's defaults differ: positions may count columns, real tokens, or ids that are not padding; some pool the first
row, some keep a cache.  Each is asked once, and what no rule explains is left to the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Tokens of the small calls, and columns where they are padded.
REAL, COLUMNS = 5, 8


@dataclass(frozen=True)
class Facts:
    """Of one model.

    Attributes:
        output: the class of its output.
        positions: what it takes for positions where none are given: "columns" counts from 0 along the row, "ids"
            counts ids other than the padding id, from past it, as RoBERTa does; None = it makes positions of its own.
        restarts: whether it takes a restart of positions for a new request, where there is neither mask nor cache.
        cache: the class of the cache that it makes with ``use_cache=True``, or None.
        pooler: what makes ``pooler_output`` of padded hidden states; None = it has none, or one that is not known.
        padding: the id that pads, by the rule "ids"; -1 where that is not the rule.
        paddings: what was in the ``padding_places`` of the model, by that rule.
        causal: whether a token's hidden state ignores the tokens after it.
    """

    output: type[Any]
    positions: str | None
    restarts: bool
    cache: type[Any] | None
    pooler: Callable[[nn.Module, Tensor], Tensor] | None
    padding: int = -1
    paddings: tuple[Any, ...] = ()
    causal: bool = False

    @property
    def alike(self) -> tuple[Any, ...]:
        """All that may differ between calls of ids and of embeddings."""
        return self.positions, self.padding, self.restarts, self.cache, self.causal


def learn(module: nn.Module, forward: Callable[..., Any], names: list[str], lead: str, sample: Tensor) -> Facts:
    """Ask the model.

    Args:
        module: the model's body.
        forward: its own forward.
        names: parameters of the forward.
        lead: "input_ids" or "inputs_embeds".
        sample: that argument of the call at hand.
    """
    tokens = small_tokens(module, lead, sample, REAL)
    try:
        out = forward(**{lead: tokens}, **({"use_cache": True} if "use_cache" in names else {}))
    except Exception:
        # It makes no cache for such a call, or none at all.
        out = forward(**{lead: tokens}, **({"use_cache": False} if "use_cache" in names else {}))
    hidden = leading(out)
    positions, padding = None, -1
    paddings = tuple(attributes.get(name) for attributes, name in padding_places(module))
    if "position_ids" in names:
        # The id that pads may be another one in the config than where the model was built by it.
        ids = dict.fromkeys(n for n in paddings if type(n) is int and n >= 0)
        for rule, pads in (("columns", -1), *(("ids", n) for n in ids)):
            given = default_positions(rule, pads, tokens if lead == "input_ids" else None, REAL, tokens.device)
            if error(leading(forward(**{lead: tokens}, position_ids=given)), hidden) <= allowed(hidden) / 100:
                positions, padding = rule, pads
                break
    cache = next((out[name] for name in ("cache", "past_key_values") if isinstance(out, dict) and name in out), None)
    made = None if cache is None else type(cache)
    restarts = _restarts(forward, names, lead, small_tokens(module, lead, sample, 2 * REAL))
    read = paddings if positions == "ids" else ()
    causal = _says_causal(module) or _is_causal(forward, names, lead, tokens, hidden)
    return Facts(type(out), positions, restarts, made, _pooler(module, out), padding, read, causal)


def _says_causal(module: nn.Module) -> bool:
    decodes = bool(getattr(module.config, "is_decoder", False))
    return decodes or any(getattr(m, "is_causal", False) for m in module.modules())


def _is_causal(forward: Callable[..., Any], names: list[str], lead: str, tokens: Tensor, hidden: Tensor) -> bool:
    """Whether the rows before the last are the same, to the bit, where the last token is another."""
    others = [t for t in tokens.unbind(1) if not torch.equal(t, tokens[:, -1])]
    if not others:
        return False
    changed = torch.cat([tokens[:, :-1], others[0][:, None]], dim=1)
    got = leading(forward(**{lead: changed}, **({"use_cache": False} if "use_cache" in names else {})))
    return torch.equal(got[:, :-1], hidden[:, :-1])


def _restarts(forward: Callable[..., Any], names: list[str], lead: str, tokens: Tensor) -> bool:
    """Whether two requests in ``tokens`` are kept apart by their positions.  Of the same tokens twice a two-sided
    attention would make what it makes of them once."""
    if "position_ids" not in names:
        return False
    once = torch.arange(REAL, device=tokens.device)[None] + 2
    call: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    alone = [leading(forward(**{lead: part}, position_ids=once, **call)) for part in tokens.split(REAL, dim=1)]
    together = leading(forward(**{lead: tokens}, position_ids=once.repeat(1, 2), **call))
    return error(together, torch.cat(alone, dim=1)) <= allowed(together)


def small_tokens(module: nn.Module, lead: str, sample: Tensor, count: int) -> Tensor:
    """``[1, count]`` ids other than the padding id, or embeddings, like ``sample``."""
    generator = torch.Generator().manual_seed(count)
    if lead == "inputs_embeds":
        return torch.randn((1, count, sample.shape[-1]), generator=generator).to(sample)
    ids = torch.randint(_vocabulary(module), (1, count), generator=generator)
    padding = padding_id(module)
    return torch.where(ids == padding, max(padding - 1, 0) or padding + 1, ids).to(sample)


def _vocabulary(module: nn.Module) -> int:
    """How many ids there are, at least: of a model that names no vocabulary, as it makes rows of codes, all bytes."""
    config: Any = module.config
    return int(getattr(config.get_text_config(), "vocab_size", None) or 256)


def padding_id(module: nn.Module) -> int:
    """The id that pads, or -1."""
    config: Any = module.config
    found = getattr(config.get_text_config(), "pad_token_id", None)
    return -1 if found is None else int(found)


def padding_places(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where a model may read the id that pads: attributes, and the names of those."""
    config: Any = module.config
    return [
        (vars(config.get_text_config()), "pad_token_id"),
        *((vars(part), "padding_idx") for part in module.modules() if "padding_idx" in vars(part)),
    ]


def default_positions(rule: str, past: int, ids: Tensor | None, columns: int, device: torch.device) -> Tensor:
    """``[B, S]`` (or ``[1, S]``) positions of a padded batch by a rule, where the id ``past`` pads."""
    if rule == "columns":
        return torch.arange(columns, device=device)[None]
    if ids is None:
        return torch.arange(columns, device=device)[None] + past + 1
    real = ids.ne(past).long()
    return real.cumsum(1) * real + past


def rule_of_padding(
    module: nn.Module, forward: Callable[..., Any], left: bool, rules: list[str | None], past: int
) -> str | bool | None:
    """The first rule by which a request alone equals what the model makes of it with padding around; False = none.

    Args:
        left: where the padding is.
        rules: as ``Facts.positions``, or "ranks", which counts real tokens.
        past: as ``Facts.padding``.
    """
    device = next(module.parameters()).device
    tokens = small_tokens(module, "input_ids", torch.zeros(1, dtype=torch.long, device=device), REAL)
    padding = tokens.new_full((1, COLUMNS - REAL), max(padding_id(module), 0))
    parts = [(padding, 0), (tokens, 1)] if left else [(tokens, 1), (padding, 0)]
    ids = torch.cat([p for p, _ in parts], dim=1)
    mask = torch.cat([torch.full_like(p, real) for p, real in parts], dim=1)
    start = COLUMNS - REAL if left else 0
    want = leading(forward(input_ids=ids, attention_mask=mask))[:, start : start + REAL]
    for rule in rules:
        call: dict[str, Any] = {}
        if rule == "ranks":
            call["position_ids"] = torch.arange(REAL, device=device)[None]
        elif rule is not None:
            found = default_positions(rule, past, ids, COLUMNS, device)
            call["position_ids"] = found[:, start : start + REAL]
        got = leading(forward(input_ids=tokens, **call))
        if error(got, want) <= allowed(got):
            return rule
    return False


def leading(output: Any) -> Tensor:
    """The hidden states."""
    return output if isinstance(output, Tensor) else output[0]


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    if got.shape != want.shape:
        return float("inf")
    return float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-6))


def allowed(got: Tensor) -> float:
    """How far two ways to compute hidden states may be apart."""
    return 1e-3 if got.dtype in (torch.float32, torch.float64) else 0.1


def _pooler(module: nn.Module, out: Any) -> Callable[[nn.Module, Tensor], Tensor] | None:
    want = out.get("pooler_output") if isinstance(out, dict) else None
    if want is None or not isinstance(getattr(module, "pooler", None), nn.Module):
        return None
    for pool in (_of_states, _of_first_row):
        try:
            got = pool(module, leading(out))
        except (TypeError, RuntimeError, AttributeError, IndexError):
            continue
        if error(got, want) <= allowed(want) / 100:
            return pool
    return None


def _of_states(module: nn.Module, hidden: Tensor) -> Tensor:
    return module.pooler(hidden)  # type: ignore[operator]


def _of_first_row(module: nn.Module, hidden: Tensor) -> Tensor:
    return module.pooler_activation(module.pooler(hidden[:, 0]))  # type: ignore[operator]
