"""Recording one run for the tape: which calls it makes, with what, and which memory they touch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from fullgraph_compile.graphs.base import CaptureError, listening
from fullgraph_compile.graphs.unrepeatable import HostReads, refuse

_EMPTY_OPS = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)  # fmt: skip


def _key(tensor: Tensor) -> int:
    """The identity of a tensor's memory, for as long as something holds it."""
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _frozen(tree: Any) -> Any:
    """The same arguments, but nothing that the caller holds: other tensor objects on the same memory, other lists."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, flat."""
    storage = tensor.untyped_storage()
    size = storage.nbytes() // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (size,), (1,))


def poison(tensor: Tensor) -> None:
    """Fill with what no run computes."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 2)


@contextmanager
def _out_of_sight() -> Iterator[None]:
    """Without our modes: compiled code is guarded on the modes that are on, and would be traced again under them."""
    functions = list(_get_current_function_mode_stack())
    others = [mode for mode in functions if not isinstance(mode, HostReads)]
    with _disable_current_modes():
        for _ in functions:
            _pop_mode()
        for mode in others:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in others:
                _pop_mode()
            for mode in functions:
                _push_mode(mode)


@dataclass(frozen=True)
class Step:
    """One recorded call, and the tensors that its outputs, by index among the leaves, are copied into."""

    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[tuple[int, Tensor], ...]

    def replay(self, kept: set[int] | None = None) -> None:
        """Call again.  ``kept`` gets the keys of memory that the call gave as an output before, and gives again."""
        outputs = self.call(*self.args, **self.kwargs)
        if self.made:
            leaves = tree_leaves(outputs)
            for i, recorded in self.made:
                recorded.copy_(leaves[i])
                if kept is not None and _key(recorded) == _key(leaves[i]):
                    kept.add(_key(recorded))


@dataclass
class Memory:
    """One storage that the run touched.

    Attributes:
        whole: all of it, flat.
        first: the call that touched it first.
        kind: "static", there before the run; "scratch", made in it; "piece", an output of an opaque call, which
            either made it or keeps it.
        before: of memory that is not scratch, what it held before the run wrote to it.
    """

    whole: Tensor
    first: str
    kind: str
    before: Tensor | None = None


class Recording(TorchDispatchMode):
    """What is known of one run while it is recorded."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.memory: dict[int, Memory] = {}
        self.opaque_ops: Counter[str] = Counter()
        self.generators: dict[torch.Generator, Tensor] = {}
        self._reads = HostReads()
        self._key = getattr(torch._C.DispatchKey, device.type.upper())
        self._watch(torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index])

    @contextmanager
    def on(self) -> Iterator[None]:
        with torch.no_grad(), listening(self), self._reads, self:
            yield

    # -- ops -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise CaptureError(f"{func} is an operator on functions, which the tape cannot record")
        refuse(func, args, kwargs)
        if self._is_python(func):
            # Recorded as one call, an op written in Python would be run again by a replay, and read the live values
            # of its integers and attributes: what it launches is recorded instead.
            with self, self.below():
                # Unlike a plain call, this one does not hand itself to function modes first.
                return func.redispatch(torch._C.DispatchKeySet(self._key), *args, **kwargs)
        if func.namespace not in ("aten", "prims"):
            self.opaque_ops[str(func)] += 1

        name = func._schema.name.partition("::")[2]
        frozen_args, frozen_kwargs = _frozen((args, kwargs))
        inputs = {self._see(t, str(func), "static") for t in _tensors((frozen_args, frozen_kwargs))}
        writes = self._about_to_write(func, frozen_args, frozen_kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator):
                self._watch(leaf)

        out = func(*args, **kwargs)
        if name == "lift_fresh":
            # Values that come from Python (torch.tensor, from_numpy): frozen, and on memory of the run's own.
            out = out.clone()
        made = tuple(
            (i, t.detach()) for i, t in enumerate(tree_leaves(out)) if isinstance(t, Tensor) and _key(t) not in inputs
        )
        for _, tensor in made:
            self._see(tensor, str(func), "scratch")
        if name == "lift_fresh":
            self.steps.append(Step(str(func), out.clone().detach, (), {}, made))
        elif name in _EMPTY_OPS:
            # No step: a replay begins with all scratch poisoned.
            for _, tensor in made:
                poison(self.memory[_key(tensor)].whole)
        elif made or writes:
            # What makes no memory and writes none is a view, and the recorded view still shows the recorded memory.
            # Memory decides, not the schema: reshape, to, contiguous make a view or a copy, depending on the call.
            self.steps.append(Step(str(func), func, frozen_args, frozen_kwargs, made))
        return out

    def _is_python(self, func: OpOverload) -> bool:
        """Whether it is a custom op whose kernel here is written in Python."""
        if func.namespace in ("aten", "prims"):
            return False
        name = func._schema.name.partition("::")[2]
        for key in (self._key.name, "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
            if func.has_kernel_for_dispatch_key(getattr(torch._C.DispatchKey, key)):
                names = (name, f"{name}.{func._overloadname}")
                return any(f"{func.namespace}/{n}/{key}" in torch.library._impls for n in names)
        return False

    def _about_to_write(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the op writes to its arguments; keeps what it will write over."""
        if torch.Tag.inplace_view in func.tags:
            return False  # changes how a tensor looks at its memory, for whoever holds the tensor
        writes = False
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(args[i] if i < len(args) else kwargs.get(argument.name)):
                    memory, writes = self.memory[_key(tensor)], True
                    if memory.kind != "scratch" and memory.before is None:
                        memory.before = memory.whole.clone()
        return writes

    # -- what is told of a run -----------------------------------------------------------------------------------

    @contextmanager
    def below(self) -> Iterator[None]:
        # A mode is off while it handles a call, and so it is inside of an op that was called under it.
        if any(isinstance(mode, HostReads) for mode in _get_current_function_mode_stack()):
            yield
            return
        with self._reads:
            yield

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = f"the compiled piece {getattr(fn, '__qualname__', repr(fn))}"
        with _out_of_sight():
            frozen_args, frozen_kwargs = tree_map(_same_class, (args, kwargs))
            inputs = {self._see(t, name, "static") for t in _tensors((frozen_args, frozen_kwargs))}
            out = fn(*args, **kwargs)
            leaves = tree_leaves(out)
            fresh = [(i, t) for i, t in enumerate(leaves) if isinstance(t, Tensor) and _key(t) not in inputs]
            for _, tensor in fresh:
                self._see(tensor, name, "piece")
            made_here = tuple((i, t.detach()) for i, t in fresh)
            self.steps.append(Step(name, fn, frozen_args, frozen_kwargs, made_here))
        return out

    # -- memory --------------------------------------------------------------------------------------------------

    def _see(self, tensor: Tensor, name: str, kind: str) -> int:
        if tensor.layout is not torch.strided:
            raise CaptureError(f"{name} takes or makes a tensor of layout {tensor.layout}, which cannot be recorded")
        key = _key(tensor)
        if key not in self.memory:
            self.memory[key] = Memory(_whole(tensor), name, kind)
        return key

    def _watch(self, generator: torch.Generator) -> None:
        if generator not in self.generators:
            self.generators[generator] = generator.get_state()

    def undo(self) -> None:
        """Give memory and generators what they had before the run."""
        with torch.inference_mode():
            for memory in self.memory.values():
                if memory.before is not None:
                    memory.whole.copy_(memory.before)
        for generator, state in self.generators.items():
            generator.set_state(state)

    def unseen(self) -> Memory | None:
        """Memory that was there before any recorded call touched it, and that nothing but the recording holds now.

        So it was made during the run behind the dispatcher's back; a replay would not make it again.
        """
        tensors = {id(t): t for s in self.steps for t in _tensors((s.args, s.kwargs, [t for _, t in s.made]))}
        held = Counter(_key(t) for t in tensors.values())
        for key, memory in self.memory.items():
            if memory.kind == "static" and held[key] and _users(memory.whole) == held[key] + 1:
                return memory
        return None


def _users(tensor: Tensor) -> int:
    """How many tensors show a tensor's memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1


def _same_class(leaf: Any) -> Any:
    """Another tensor object on the same memory, of the class that compiled code is guarded on."""
    if type(leaf) is torch.nn.Parameter:
        return torch.nn.Parameter(leaf.detach(), requires_grad=leaf.requires_grad)
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
