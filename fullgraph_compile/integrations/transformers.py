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

from fullgraph_compile.batch import PrefillBatch, no_active_batch
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.graphs.streams import aside
from fullgraph_compile.integrations import hf_facts, hf_heads, hf_masks
from fullgraph_compile.integrations.hf_attention import ATTENTION, Watching, attention_function
from fullgraph_compile.integrations.hf_checks import Checks
from fullgraph_compile.integrations.hf_facts import REAL, Facts
from fullgraph_compile.integrations.packing import Spans
from fullgraph_compile.integrations.plain import Bound, ModuleChanged, NotServed, PlainModule, device_of
from fullgraph_compile.integrations.refusing import refusing
from fullgraph_compile.refusals import Refusals
from fullgraph_compile.results import Outputs


def is_transformers(module: nn.Module) -> bool:
    """Whether the module is a transformers model; does not import transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


class TransformersModule(PlainModule):
    """A ``PreTrainedModel`` without a head: its attention is switched to the op by name while it is traced.

    Args:
        module: the model's body.
        whole: the model with its head, or the body itself.

    Attributes:
        op_attention: false for a model whose attention calls are not what transformers' interface says of them, or that
            attends by code of its own: it is left as it is, and found in the traced graph.
        facts: what the model means by a call; None before the first one.
        outputs: makes objects of the classes of its outputs.
        compares_columns: whether what is on top of the hidden states compares the columns of a padded batch.
        shifts_labels: whether a label may be that of the position before it.
    """

    op_attention = switches = True
    not_tokens = frozenset({"logits_to_keep"})

    def __init__(self, module: nn.Module, whole: nn.Module) -> None:
        super().__init__(module)
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention_function)
        hf_masks.register()
        self.name = type(whole).__name__
        parameters = inspect.signature(module.forward).parameters
        self.names = list(parameters)
        # Arguments of which None says no more than that they are not given.
        self.optional = frozenset(name for name, p in parameters.items() if p.default is None)
        self.facts: Facts | None = None
        # Whether they are so for ids, and for embeddings.
        self._means_the_same: dict[str, bool] = {}
        self._rows_stay = whole is module or hf_heads.keeps_rows(whole)
        heads = hf_heads.names_above(whole, module)
        self._whole_pools = hf_heads.pools(heads)
        self.compares_columns = hf_heads.compares_columns(heads)
        self.shifts_labels = hf_heads.shifts_labels(heads)
        self._configs = _configs(module)
        self._checks = Checks(self)
        self._paddings: list[tuple[dict[str, Any], str]] = []
        self._prepared = False
        self._primed: set[Any] = set()
        # Rule of the positions by where the padding is; False = calls with such padding are not served.
        self._rules: dict[bool, str | bool | None] = {}
        # No graph tells when such a call could be served again, as after a change of the model, so it is asked.
        self._refused = Refusals()
        self._lock = threading.RLock()
        self.outputs = Outputs()

    @contextmanager
    def attention(self, name: str = ATTENTION) -> Iterator[None]:
        # Straight into the config's dict: its own attribute access costs more than the rest of a call's checks.
        before = [config["_attn_implementation_internal"] for config in self._configs]
        # A pooler reads the first row of each request, which are not the first rows of a packed call.
        pooler = self.module._modules.get("pooler") if self.switched and name == ATTENTION else None
        try:
            if pooler is not None:
                self.module._modules["pooler"] = None
            if name != ATTENTION or self.op_attention:
                for config in self._configs:
                    config["_attn_implementation_internal"] = name
            yield
        finally:
            if pooler is not None:
                self.module._modules["pooler"] = pooler
            for config, old in zip(self._configs, before, strict=True):
                config["_attn_implementation_internal"] = old

    @property
    def switched(self) -> list[dict[str, Any]]:
        pools = self.facts is not None and self.facts.pooler is not None
        return [self.module._modules] if pools else []

    @property
    def all_or_nothing(self) -> bool:
        return self.one_request or not self.op_attention

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
        from fullgraph_compile.integrations.hf_front import Reading

        return Reading(self, given).bind(given, active)

    def surroundings(self) -> tuple[Any, ...]:
        config = self.module.config
        # Past the config's own attribute access, which costs more than all else.
        own = object.__getattribute__(config, "__dict__")
        use_cache = own["use_cache"] if "use_cache" in own else getattr(config, "use_cache", None)
        return_dict = own["return_dict"] if "return_dict" in own else getattr(config, "return_dict", None)
        return use_cache, return_dict, *[attributes.get(name) for attributes, name in self._paddings]

    @property
    def prepared(self) -> bool:
        return self._prepared

    def forget(self) -> None:
        with self._lock:
            self.facts = None
            self._means_the_same.clear()
            self._paddings = []
            self._prepared, self.op_attention, self.one_request = False, True, False
            self._primed.clear()
            self._rules.clear()
            self._refused.clear()
            self.outputs = Outputs()
            self._configs = _configs(self.module)

    # -- what the model means --------------------------------------------------------------------------------------

    def _asked(self, **call: Any) -> Any:
        """The model's own answer to a call of ours: without a cache unless it asks for one, and where the model has an
        encoder beside its decoder, with the same tokens for both."""
        if "use_cache" in self.names:
            call.setdefault("use_cache", False)
        if "decoder_input_ids" in self.names:
            for name in ("input_ids", "attention_mask"):
                if name in call and f"decoder_{name}" in self.names:
                    call[f"decoder_{name}"] = call[name]
        return self.forward(**call)

    @property
    def reads_first_column(self) -> bool:
        """Whether something on top of the hidden states reads the first column of a padded batch."""
        if self.facts is None or self.facts.causal:
            return False
        return self.facts.pooler is not None or self._whole_pools

    @property
    def reads_last_token(self) -> bool:
        """Whether something on top of the hidden states reads one row of each request: the last that is no padding,
        which it tells by ids, or the last column."""
        return self._whole_pools and self.facts is not None and self.facts.causal

    @property
    def keeps_rows(self) -> bool:
        """Whether what is on top of the hidden states takes each row by itself, or what the body has pooled."""
        return self._rows_stay or (self._whole_pools and self.facts is not None and self.facts.pooler is not None)

    def check_requests(self, batch: PrefillBatch) -> None:
        """Raise ``NotServed`` unless the requests of a batch may be one row of a call."""
        if not self.keeps_rows and batch.requests > 1:
            raise NotServed(
                Reason.ARGUMENTS,
                f"{self.name} may put rows of several requests of a packed call together; give a padded batch, or call "
                f"the {type(self.module).__name__} in it",
            )

    def learn(self, given: dict[str, Any]) -> None:
        # No guard of a trace, which is given positions, tells that the model makes others now.
        if self.facts is not None and self.facts.paddings != tuple(d.get(name) for d, name in self._paddings):
            raise ModuleChanged
        leads = [n for n in ("input_ids", "inputs_embeds") if isinstance(given.get(n), Tensor)]
        if len(leads) != 1 or leads[0] in self._means_the_same:
            return
        (lead,) = leads
        with self._lock:
            if self.facts is not None:
                self._means_the_same[lead] = self._asked_alike(lead, given[lead], self.facts)
                return
            facts = self._facts_of(lead, given[lead])
            if not issubclass(facts.output, dict) and not getattr(self.module.config, "return_dict", True):
                # Not kept: it would hold no longer once that is set again.
                raise NotServed(Reason.ARGUMENTS, f"{self.name}.config.return_dict is False: its output has no names")
            self._paddings = hf_facts.padding_places(self.module) if facts.paddings else []
            self.facts, self._means_the_same[lead] = facts, True

    def _asked_alike(self, lead: str, tokens: Tensor, facts: Facts) -> bool:
        """Whether the model means the same by calls of this kind as by those that it was asked by first."""
        try:
            return self._facts_of(lead, tokens).alike == facts.alike
        except NotServed:
            return False

    def _facts_of(self, lead: str, tokens: Tensor) -> Facts:
        """What it means by a call of ids, or of embeddings.

        Raises:
            NotServed: it cannot be asked.
        """
        asks = f"{self.name} cannot be asked what it means by a call: one of {REAL} tokens of {lead} alone"
        with torch.no_grad(), no_active_batch(), refusing(Reason.ARGUMENTS, asks), aside(tokens.device):
            return hf_facts.learn(self.module, self._asked, self.names, lead, tokens)

    def check_lead(self, lead: str) -> None:
        """Raise ``NotServed`` if the facts are not those of a call of ids, or of embeddings."""
        if not self._means_the_same.get(lead, True):
            raise NotServed(
                Reason.ARGUMENTS, f"{self.name} takes {lead} in another way than what it was first called with"
            )

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
        if self._rules.get(left) is False:
            self._refused.check(left)
            del self._rules[left]
        if left not in self._rules:
            rules: list[str | None] = [rule, "ranks"] if rule == "columns" else [rule]
            with self._lock, torch.no_grad(), no_active_batch(), refusing(Reason.ATTENTION):
                self._rules[left] = hf_facts.rule_of_padding(self.module, self._asked, left, rules, self.facts.padding)
        found = self._rules[left]
        if found is False:
            side = "left" if left else "right"
            refusal = NotServed(Reason.MASK, f"{side} padding changes what {self.name} computes for its real tokens")
            self._refused.add(left, refusal)
            raise refusal
        return found  # type: ignore[return-value]

    # -- before a trace ------------------------------------------------------------------------------------------

    def prepare(self, call: dict[str, Any]) -> None:
        """Prime each form of the call, and check the model once.

        transformers installs hooks at the first call that asks for more outputs, which would not trace.
        """
        form = frozenset((k, v) for k, v in call.items() if v is None or isinstance(v, (bool, str)))
        if self._prepared and form in self._primed:
            return
        device = device_of(call)
        with self._lock, aside(device):
            small = self._checks.small_call(call, REAL)
            if self._prepared:
                with torch.no_grad(), no_active_batch(), refusing(Reason.ARGUMENTS):
                    self.forward(**small)
            else:
                self._check(call)
                self._prepared = True
            self._primed.add(form)

    def _check(self, call: dict[str, Any]) -> None:
        try:
            self._checks.check_op(call)
        except NotServed as refusal:
            if found := self._checks.recurrent():
                if found in refusal.detail:
                    raise
                raise NotServed(refusal.reason, f"{self.name} has recurrent layers ({found})") from refusal
            # The model may attend by itself, or mask its calls by more than they say.
            with torch.no_grad(), no_active_batch(), refusing(Reason.ATTENTION), Watching(REAL) as watching:
                self.forward(**self._checks.small_call(call, REAL))
            if not watching.attends:
                raise
            self.op_attention = self.one_request = False

    def check_trace(
        self,
        call: dict[str, Any],
        traced: Callable[[dict[str, Any]], Any],
        lengths: tuple[int, ...] = (REAL, 4),
        *,
        strict: bool = True,
    ) -> bool:
        return self._checks.check_trace(call, traced, lengths, strict=strict)


def _configs(module: nn.Module) -> list[dict[str, Any]]:
    """The attributes of the configs that a model's attention modules read: its own and its parts', each once."""
    configs = {id(c): c for m in module.modules() if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
    return [vars(config) for config in configs.values()]
