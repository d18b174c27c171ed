"""Everything that knows transformers: its attention interface, its arguments, its positions."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullgraph_compile import ops
from fullgraph_compile.batch import PrefillBatch, no_active_batch
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations import hf_facts
from fullgraph_compile.integrations.hf_facts import COLUMNS, REAL, Facts, allowed, error, leading
from fullgraph_compile.integrations.packing import Spans
from fullgraph_compile.integrations.plain import Bound, NotServed, PlainModule
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
    """A ``PreTrainedModel`` without a head: its attention is switched to the op by name while it is traced.

    Args:
        module: the model's body.
        whole: the model with its head, or the body itself.

    Attributes:
        facts: what the model means by a call; None before the first one.
    """

    op_attention = True
    not_tokens = frozenset({"logits_to_keep"})

    def __init__(self, module: nn.Module, whole: nn.Module) -> None:
        super().__init__(module)
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention_function)
        self.name = type(whole).__name__
        self.names = list(inspect.signature(module.forward).parameters)
        self.facts: Facts | None = None
        self._whole_pools = whole is not module and any(part in self.name for part in _POOLING)
        config: Any = module.config
        decodes = bool(getattr(config, "is_decoder", False))
        self._causal = decodes or any(getattr(m, "is_causal", False) for m in module.modules())
        self._configs = _configs(module)
        self._prepared = False
        self._primed: set[Any] = set()
        # Rule of the positions by where the padding is; False = calls with such padding are not served.
        self._rules: dict[bool, str | bool | None] = {}
        self._lock = threading.RLock()

    @contextmanager
    def attention(self, name: str = ATTENTION) -> Iterator[None]:
        # Straight into the config's dict: its own attribute access costs more than the rest of a call's checks.
        before = [config["_attn_implementation_internal"] for config in self._configs]
        # A pooler reads the first row of each request, which are not the first rows of a packed call.
        pools = self.facts is not None and self.facts.pooler is not None
        pooler = self.module._modules.get("pooler") if pools and name == ATTENTION else None
        try:
            if pooler is not None:
                self.module._modules["pooler"] = None
            for config in self._configs:
                config["_attn_implementation_internal"] = name
            yield
        finally:
            if pooler is not None:
                self.module._modules["pooler"] = pooler
            for config, old in zip(self._configs, before, strict=True):
                config["_attn_implementation_internal"] = old

    def traceable(self) -> Callable[..., Any]:
        from fullgraph_compile.integrations.hf_cache import keeping_keys

        return keeping_keys(super().traceable())

    def token_dims(self, call: dict[str, Any]) -> dict[str, int]:
        dims = super().token_dims(call)
        if "position_ids" in call:
            # Its axes may be as many as the tokens.
            dims["position_ids"] = call["position_ids"].dim() - 1
        return dims

    def bind(self, given: dict[str, Any], active: PrefillBatch | None) -> Bound:
        from fullgraph_compile.integrations.hf_front import bind

        return bind(self, given, active)

    # -- what the model means --------------------------------------------------------------------------------------

    @property
    def reads_first_column(self) -> bool:
        """Whether something on top of the hidden states reads the first column of a padded batch."""
        pools = self.facts is not None and self.facts.pooler is not None
        return (pools or self._whole_pools) and not self._causal

    def learn(self, given: dict[str, Any]) -> None:
        leads = [n for n in ("input_ids", "inputs_embeds") if isinstance(given.get(n), Tensor)]
        if self.facts is not None or len(leads) != 1:
            return
        with self._lock, torch.no_grad(), no_active_batch(), refusing(Reason.ARGUMENTS):
            if self.facts is None:
                self.facts = hf_facts.learn(self.module, self.forward, self.names, leads[0], given[leads[0]])

    def positions_for(self, spans: Spans) -> str | None:
        """What the model takes for positions of a padded batch where none are given: a rule of ``hf_facts``, or
        "ranks", which counts real tokens; None = none are given to it.

        Raises:
            NotServed: padding means something to this model that no rule explains.
        """
        if "position_ids" not in self.names:
            rule: str | None = None
        else:
            rule = "columns" if self.facts is None else self.facts.positions
        if spans.dense or self.facts is None:
            return rule
        left = spans.left
        if left not in self._rules:
            with self._lock:
                self._rules[left] = self._rule_of_padding(left, [rule, "ranks"] if rule == "columns" else [rule])
        found = self._rules[left]
        if found is False:
            side = "left" if left else "right"
            raise NotServed(Reason.MASK, f"{side} padding changes what {self.name} computes for its real tokens")
        return found  # type: ignore[return-value]

    def _rule_of_padding(self, left: bool, rules: list[str | None]) -> str | bool | None:
        """The first rule by which a padded request, packed through the op, equals the model's own call."""
        device = next(self.module.parameters()).device
        lead, sample = "input_ids", torch.zeros(1, dtype=torch.long, device=device)
        tokens = hf_facts.small_tokens(self.module, lead, sample, REAL)
        padding = tokens.new_full((1, COLUMNS - REAL), max(hf_facts.padding_id(self.module), 0))
        parts = [(padding, 0), (tokens, 1)] if left else [(tokens, 1), (padding, 0)]
        ids = torch.cat([p for p, _ in parts], dim=1)
        mask = torch.cat([torch.full_like(p, real) for p, real in parts], dim=1)
        start = COLUMNS - REAL if left else 0
        sites: list[str] = []
        with torch.no_grad(), no_active_batch(), refusing(Reason.ATTENTION):
            for implementation in (None, "eager"):
                with self.attention(implementation) if implementation else _as_it_is():
                    want = leading(self.forward(input_ids=ids, attention_mask=mask))[:, start : start + REAL]
                for rule in rules:
                    call: dict[str, Any] = {}
                    if rule == "ranks":
                        call["position_ids"] = torch.arange(REAL, device=device)[None]
                    elif rule is not None:
                        found = hf_facts.default_positions(rule, self.module, ids, COLUMNS, device)
                        assert found is not None
                        call["position_ids"] = found[:, start : start + REAL]
                    with self.attention(), counting_sites(sites), PrefillBatch([REAL], device=device):
                        got = leading(self.forward(input_ids=tokens, **call))
                    self._check_sites(sites)
                    if error(got, want) <= allowed(got):
                        return rule
        return False

    # -- before a trace ------------------------------------------------------------------------------------------

    def prepare(self, call: dict[str, Any]) -> None:
        """Prime each form of the call, and check the model once.

        transformers installs hooks at the first call that asks for more outputs, which would not trace.
        """
        form = frozenset((k, v) for k, v in call.items() if isinstance(v, (bool, str)))
        if self._prepared and form in self._primed:
            return
        with self._lock:
            small = self._small_call(call, REAL)
            if self._prepared:
                with torch.no_grad(), no_active_batch(), refusing(Reason.ARGUMENTS):
                    self.forward(**small)
            else:
                self._check(call)
                self._prepared = True
            self._primed.add(form)

    def _check(self, call: dict[str, Any]) -> None:
        """Two short packed requests through the op, against the user's own attention, each alone."""
        lengths = (REAL, 4)
        calls = [self._small_call(call, n) for n in lengths]
        dims = self.token_dims(calls[0])
        packed = {k: torch.cat([c[k] for c in calls], dim=dims[k]) if k in dims else v for k, v in calls[0].items()}
        device = next(v.device for v in call.values() if isinstance(v, Tensor))
        sites: list[str] = []
        with torch.no_grad(), no_active_batch(), refusing(Reason.ATTENTION):
            with self.attention(), counting_sites(sites), PrefillBatch(lengths, device=device):
                got = leading(self.forward(**packed))
            self._check_sites(sites)
            # Some of transformers' implementations drop what others compute (sdpa: the soft cap), so the model's
            # eager attention is a second opinion.
            alone = self._alone(calls)
            errors = [error(got, alone)]
            if not errors[-1] <= allowed(got):
                with self.attention("eager"):
                    errors.append(error(got, self._alone(calls)))
        if not errors[-1] <= allowed(got):
            raise NotServed(
                Reason.ATTENTION,
                f"two packed requests differ from each alone by {errors[0]:.2g} of the largest value: "
                f"{self.name} masks or mixes in a way that its attention calls do not say",
            )
        if len(errors) > 1:
            log.info(
                "%s: replays equal its eager attention; the implementation that was set differs from that by %.2g",
                self.name,
                errors[0],
            )

    def _check_sites(self, sites: list[str]) -> None:
        if not sites:
            raise NotServed(
                Reason.NO_SITES,
                f"{self.name} never calls transformers' attention interface, so its attention cannot be marked",
            )

    def _alone(self, calls: list[dict[str, Any]]) -> Tensor:
        """Each request in a call of its own, rows put together."""
        return torch.cat([leading(self.forward(**c)) for c in calls], dim=1)

    def _small_call(self, call: dict[str, Any], tokens: int) -> dict[str, Any]:
        """The same kind of call with ``tokens`` tokens of one request, and all rows returned."""
        small: dict[str, Any] = {}
        dims = self.token_dims(call)
        for name, value in call.items():
            if name in ("logits_to_keep", "use_cache"):
                continue
            if name in ("input_ids", "inputs_embeds"):
                small[name] = hf_facts.small_tokens(self.module, name, value, tokens)
            elif name == "position_ids":
                small[name] = self._small_positions(value, tokens)
            elif name in dims:
                shape = list(value.shape)
                shape[dims[name]] = tokens
                small[name] = value.narrow(dims[name], 0, 1).expand(shape)
            else:
                small[name] = value
        return small

    def _small_positions(self, like: Tensor, tokens: int) -> Tensor:
        past = hf_facts.padding_id(self.module) + 1 if self.facts and self.facts.positions == "ids" else 0
        return (torch.arange(tokens, device=like.device) + past).expand(*like.shape[:-1], tokens)


# Heads of two-sided models that read one row of each request, by the class's name.
_POOLING = ("SequenceClassification", "MultipleChoice", "NextSentence", "ForPreTraining")


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def refusing(reason: Reason) -> Iterator[None]:
    """Small calls of our own that the model cannot make: the user's call then runs as it is."""
    try:
        yield
    except NotServed:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise NotServed(reason, f"a small call to learn from failed: {type(error).__name__}: {first}") from error


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


def _configs(module: nn.Module) -> list[dict[str, Any]]:
    """The attributes of the configs that a model's attention modules read: its own and its parts', each once."""
    configs = {id(c): c for m in module.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
    return [vars(config) for config in configs.values()]
