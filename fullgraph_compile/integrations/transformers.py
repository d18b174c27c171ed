"""Everything that knows transformers: its attention interface, its arguments, its positions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullgraph_compile import ops
from fullgraph_compile.batch import PrefillBatch, no_active_batch
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.plain import NotServed, PlainModule
from fullgraph_compile.report import log

# A name that transformers' mask registry does not know: no mask is built for it, as the op makes its own.
ATTENTION = "full_prefill"

# Arguments of an attention function that change nothing of what the op computes.
_NO_EFFECT = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict",
     "output_router_logits", "logits_to_keep", "labels", "num_items_in_batch", "is_causal", "head_mask",
     "past_key_values", "layer_idx", "deterministic", "position_embeddings"}
)  # fmt: skip


def is_transformers(module: nn.Module) -> bool:
    """Whether the module is a transformers model; does not import transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface on the op.

    Args:
        query: ``[1, heads, T, head_size]``.
        key: ``[1, kv_heads, T, head_size]``.
        value: ``[1, kv_heads, T, value_head_size]``.

    Returns:
        ``[1, T, heads, value_head_size]``, and no attention weights.

    Raises:
        NotServed: the call means something that the op does not say.
    """
    name = type(module).__name__
    if attention_mask is not None:
        raise NotServed(Reason.ATTENTION, f"{name} gives its attention a mask of its own")
    if query.shape[0] != 1:
        raise NotServed(Reason.BATCHED, f"{name} attends with a batch dim of {query.shape[0]}")
    if dropout:
        raise NotServed(Reason.TRAINING, f"{name} attends with dropout {dropout}")
    unknown = sorted(k for k, v in others.items() if v is not None and v is not False and k not in _NO_EFFECT)
    if unknown:
        raise NotServed(Reason.ATTENTION, f"{name} gives its attention {', '.join(unknown)}, which is not understood")
    causal = others.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    left = -1 if sliding_window is None else int(sliding_window) - 1
    right = 0 if causal else left
    out = ops.attention(q, k, v, s_aux, None, scale, left, right, float(softcap or 0.0), -1)
    return out.unsqueeze(0), None


class TransformersModule(PlainModule):
    """A ``PreTrainedModel``: its attention is switched to the op by name while it is traced."""

    op_attention = True
    not_tokens = frozenset({"logits_to_keep"})

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention_function)
        self._configs = _configs(module)
        parameters = inspect.signature(module.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_cache = "use_cache" in parameters or any(
            p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
        )

    @contextmanager
    def attention(self, name: str = ATTENTION) -> Iterator[None]:
        # Straight into the config's dict: its own attribute access costs more than the rest of a call's checks.
        before = [config["_attn_implementation_internal"] for config in self._configs]
        try:
            for config in self._configs:
                config["_attn_implementation_internal"] = name
            yield
        finally:
            for config, old in zip(self._configs, before, strict=True):
                config["_attn_implementation_internal"] = old

    def canonical(self, call: dict[str, Any], batch: PrefillBatch | None) -> dict[str, Any]:
        call = {k: v for k, v in call.items() if v is not None}
        mask = call.get("attention_mask")
        if mask is not None:
            raise NotServed(Reason.MASK, f"attention_mask of shape {tuple(getattr(mask, 'shape', ()))}")
        for name in ("past_key_values", "labels", "output_attentions"):
            if call.get(name):
                raise NotServed(Reason.ARGUMENTS, f"{name} is given")
        if self._uses_cache(call):
            raise NotServed(Reason.ARGUMENTS, "use_cache is on: give use_cache=False, as a prefill keeps no such cache")
        tokens = call.get("input_ids", call.get("inputs_embeds"))
        wants = self._takes_positions and "position_ids" not in call
        if wants and isinstance(tokens, Tensor) and tokens.dim() > 1 and tokens.shape[0] == 1:
            call["position_ids"] = self._positions(tokens, batch)
        return call

    def _uses_cache(self, call: dict[str, Any]) -> bool:
        if not self._takes_cache:
            return False
        if "use_cache" in call:
            return bool(call["use_cache"])
        return bool(getattr(self.module.config, "use_cache", False))

    @staticmethod
    def _positions(tokens: Tensor, batch: PrefillBatch | None) -> Tensor:
        """Positions are always given, so that calls with and without them are one graph."""
        if batch is not None and batch.tokens == tokens.shape[1]:
            return batch.position_ids[None]
        return torch.arange(tokens.shape[1], device=tokens.device)[None]

    def prepare(self, call: dict[str, Any]) -> None:
        """Prime and check: two short packed requests through the op, against the user's own attention, each alone.

        The eager call also installs what transformers installs at first use, which would not trace.
        """
        lengths = (5, 4)
        calls = [self._small_call(call, n) for n in lengths]
        packed = {
            k: torch.cat([c[k] for c in calls], dim=1) if isinstance(v, Tensor) else v for k, v in calls[0].items()
        }
        sites: list[str] = []
        with torch.no_grad(), no_active_batch():
            with self.attention(), counting_sites(sites), PrefillBatch(lengths, device=_device_of(packed)):
                got = self._leading_tensor(self.forward(**packed))
            if not sites:
                raise NotServed(
                    Reason.NO_SITES,
                    f"{type(self.module).__name__} never calls transformers' attention interface, so its attention "
                    "cannot be marked",
                )
            # Some of transformers' implementations drop what others compute (sdpa: the soft cap), so the model's
            # eager attention is a second opinion.
            alone = self._alone(calls)
            together = self._leading_tensor(self.forward(**packed))
            self.restarts_are_requests = _error(together, alone) <= _allowed(got)
            errors = [_error(got, alone)]
            if not errors[-1] <= _allowed(got):
                with self.attention("eager"):
                    errors.append(_error(got, self._alone(calls)))
        if not errors[-1] <= _allowed(got):
            raise NotServed(
                Reason.ATTENTION,
                f"two packed requests differ from each alone by {errors[0]:.2g} of the largest value: "
                f"{type(self.module).__name__} masks or mixes in a way that its attention calls do not say",
            )
        if len(errors) > 1:
            log.info(
                "%s: replays equal its eager attention; the implementation that was set differs from that by %.2g",
                type(self.module).__name__,
                errors[0],
            )

    def _alone(self, calls: list[dict[str, Any]]) -> Tensor:
        """Each request in a call of its own, rows put together."""
        return torch.cat([self._leading_tensor(self.forward(**c)) for c in calls], dim=1)

    def _small_call(self, call: dict[str, Any], tokens: int) -> dict[str, Any]:
        """The same kind of call with ``tokens`` tokens of one request, and all rows returned."""
        small: dict[str, Any] = {}
        generator = torch.Generator().manual_seed(tokens)
        for name, value in call.items():
            if name == "logits_to_keep":
                continue
            if name == "input_ids":
                config: Any = self.module.config
                vocabulary = config.get_text_config().vocab_size
                small[name] = torch.randint(vocabulary, (1, tokens), generator=generator).to(value)
            elif name == "position_ids":
                small[name] = torch.arange(tokens, device=value.device).expand(*value.shape[:-1], tokens)
            elif name == "inputs_embeds":
                small[name] = torch.randn((1, tokens, value.shape[-1]), generator=generator).to(value)
            else:
                small[name] = value
        return small

    @staticmethod
    def _leading_tensor(output: Any) -> Tensor:
        return output if isinstance(output, Tensor) else output[0]


@contextmanager
def counting_sites(sites: list[str]) -> Iterator[None]:
    """Append to ``sites`` at each call of the op that is made eagerly."""
    before = ops.direct_attention()

    def counted(*args: Any) -> Tensor:
        sites.append("")
        return before(*args)

    ops.set_direct_attention(counted)
    try:
        yield
    finally:
        ops.set_direct_attention(before)


def _error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    if got.shape != want.shape:
        return float("inf")
    return float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-6))


def _allowed(got: Tensor) -> float:
    return 1e-3 if got.dtype in (torch.float32, torch.float64) else 0.1


def _device_of(call: dict[str, Any]) -> torch.device:
    return next(v.device for v in call.values() if isinstance(v, Tensor))


def _configs(module: nn.Module) -> list[dict[str, Any]]:
    """The attributes of the configs that a model's attention modules read: its own and its parts', each once."""
    configs = {id(c): c for m in module.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
    return [vars(config) for config in configs.values()]
