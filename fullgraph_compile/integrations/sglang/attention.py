"""SGLang's attention modules as sites: an op in the trace, the module itself when the body runs.

NOTE: A site is a module, never a layer number: two modules of one MLA layer share theirs, and differ in heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fullgraph_compile.ops import AttentionSite, hosted_attention

if TYPE_CHECKING:
    from fullgraph_compile.integrations.sglang.own_attention import OwnAttention

# Further tensors of a call that the op can carry, and what is no tensor.
TENSORS = ("q_rope", "k_rope", "sinks", "topk_indices", "cos_sin_cache", "llama_4_scaling")
CONSTANTS = ("is_neox",)
# Set on each module for the time of a capture.
_NUMBER = "_full_prefill_site"


@dataclass(frozen=True)
class HostedCall:
    """One call to an attention module in the traced body.

    Attributes:
        module: index into the modules of the body.
        names: keywords of the tensors after q, k and v.
        save_kv: whether the call writes its keys and values to the cache.
        constants: keywords that are no tensors.
        width: elements of an output row.
    """

    module: int
    names: tuple[str, ...]
    save_kv: bool
    constants: dict[str, Any]
    width: int


@dataclass
class Sites:
    """The attention modules of a body, in the order in which they are first called.

    Attributes:
        forward: the attention modules' own forward.
        modules: each has its index as its number while a capture goes on.
        refused: what the op cannot express, in words; filled by the eager call before the trace.
        batch: SGLang's batch of the call that runs.
        context: finds the context in which older releases look a module up by its layer number, again; None = there is
            no such thing.
        backend: finds the attention backend of the forward that runs.
        dtypes: of the queries of each module; filled by the eager call.
        extras: names of what else attention gets; filled by the eager call.
        own: attends in SGLang's place, where it has a backend.
    """

    forward: Callable[..., Any]
    context: Callable[[], Any] | None = None
    backend: Callable[[], Any] | None = None
    modules: list[Any] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    batch: Any = None
    dtypes: list[torch.dtype] = field(default_factory=list)
    extras: set[str] = field(default_factory=set)
    own: OwnAttention | None = None

    def record(self, module: Any, q: Tensor, result: Any, key_value_num_tokens: Any, names: Sequence[str]) -> None:
        """Learn of one call from the eager run of the body."""
        if not hasattr(module, _NUMBER):
            setattr(module, _NUMBER, len(self.modules))
            self.modules.append(module)
            self.dtypes.append(q.dtype)
        self.extras.update(names)
        layer = f"attention of layer {getattr(module, 'layer_id', '?')}"
        unknown = sorted(n for n in names if n not in TENSORS + CONSTANTS)
        if unknown:
            self.refused.append(f"{layer} gets {', '.join(unknown)}, which is unknown")
        if key_value_num_tokens is not None:
            self.refused.append(f"{layer} gets key_value_num_tokens, which is unknown")
        if not isinstance(result, Tensor):
            self.refused.append(f"{layer} returns more than its output")

    def forget(self) -> None:
        for module in self.modules:
            with contextlib.suppress(AttributeError):
                delattr(module, _NUMBER)
        self.modules, self.refused, self.batch = [], [], None
        self.dtypes, self.extras = [], set()

    def begin(self) -> None:
        """Each pass over the body starts so."""
        if self.own is not None:
            self.own.begin(self.batch)

    def call(self, call: HostedCall, operands: Sequence[Any]) -> Tensor:
        """Attend, as SGLang does for the batch that runs.

        Args:
            operands: q, k and v, then the tensors of ``call.names``.
        """
        q, k, v, *others = operands
        if self.own is not None and self.own.backend is not None:
            return self.own.attend(call, q, k, v)
        module = self.modules[call.module]
        if not others and self._may_be_direct(call, q, k):
            k, v = (
                k.view(-1, module.tp_k_head_num, module.qk_head_dim),
                v.view(-1, module.tp_v_head_num, module.v_head_dim),
            )
            backend = self.backend()  # type: ignore[misc]
            return backend.forward(q, k, v, module, self.batch, call.save_kv).reshape(-1, call.width)
        result = self.attend(
            module, q, k, v, self.batch, call.save_kv,
            **dict(zip(call.names, others, strict=True)), **call.constants,
        )  # fmt: skip
        return result.reshape(-1, call.width)

    def _may_be_direct(self, call: HostedCall, q: Tensor, k: Any) -> bool:
        """Whether the attention backend may be called without SGLang's wrapper, which copies the backend's output into
        a tensor of its own.  At a capture all rows are real, so there is nothing else that it does."""
        if self.backend is None or k is None or call.constants:
            return False
        real = getattr(self.batch, "global_num_token_non_padded_cpu", None)
        real = getattr(self.batch, "num_token_non_padded_cpu", None) if real is None else real
        return (
            type(self.backend()).__name__ == "FlashInferAttnBackend"
            and real == q.shape[0]
            and not getattr(self.batch, "mha_return_lse", False)
        )

    def attend(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The attention module's own forward."""
        context = None if self.context is None else self.context()
        if context is None:
            return self.forward(module, *args, **kwargs)
        with replaced(context, "attention_layers", _Always(module)), replaced(context, "mha_companion_layers", None):
            return self.forward(module, *args, **kwargs)

    def described(self, body: nn.Module) -> tuple[AttentionSite, ...]:
        """The sites for a report."""
        paths = {id(m): name for name, m in body.named_modules()}
        dtype = next((p.dtype for p in body.parameters()), torch.float32)
        return tuple(
            AttentionSite(
                i, type(m).__name__, paths.get(id(m), ""), int(m.tp_q_head_num), int(m.tp_k_head_num),
                int(m.qk_head_dim), int(m.v_head_dim), float(m.scaling),
                right=0 if getattr(m.attn_type, "value", "decoder") == "decoder" else -1,
                left=int(m.sliding_window_size) if (m.sliding_window_size or -1) > 0 else -1,
                softcap=float(m.logit_cap or 0.0), dtype=dtype,
            )
            for i, m in enumerate(self.modules)
        )  # fmt: skip


class _Always:
    """A list that has one and the same module everywhere."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getitem__(self, index: int) -> nn.Module:
        return self.module


def hooked_forward(sites: Sites) -> Callable[..., Any]:
    """What stands for ``RadixAttention.forward`` during a capture."""

    def forward(
        self: Any, q: Tensor, k: Any, v: Any, forward_batch: Any, save_kv_cache: bool = True,
        key_value_num_tokens: int | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if not torch.compiler.is_compiling():
            result = sites.attend(self, q, k, v, forward_batch, save_kv_cache, key_value_num_tokens, **kwargs)
            sites.record(self, q, result, key_value_num_tokens, [n for n in kwargs if kwargs[n] is not None])
            return result
        names = [n for n in TENSORS if kwargs.get(n) is not None]
        others = [kwargs[n] for n in names]
        constants = ",".join([f"{n}={int(kwargs[n])}" for n in CONSTANTS if kwargs.get(n) is not None])
        facts = f"{int(save_kv_cache)};{','.join(names)};{constants}"
        width = self.tp_q_head_num * self.v_head_dim
        return torch.ops.full_prefill.hosted_attention.default(q, k, v, others, facts, width, self._full_prefill_site)

    return forward


def number_calls(gm: GraphModule) -> tuple[HostedCall, ...]:
    """Number the attention calls of a graph: the last argument, which named the module, becomes the call's index."""
    calls: list[HostedCall] = []
    for node in gm.graph.nodes:
        if node.target is not hosted_attention:
            continue
        q, k, v, others, facts, width, module = node.args
        save, names, constants = str(facts).split(";")
        pairs = (c.split("=") for c in filter(None, constants.split(",")))
        calls.append(
            HostedCall(
                int(module), tuple(filter(None, names.split(","))), save == "1", {n: bool(int(x)) for n, x in pairs},
                int(width),
            )
        )  # fmt: skip
        node.args = (q, k, v, others, facts, width, len(calls) - 1)
    gm.recompile()
    return tuple(calls)


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute, for a time."""
    before = holder.__dict__.get(name, _ABSENT)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


_ABSENT = object()
