"""Cut the body at its attention calls, for compilation only, and find the pieces that are equal but for weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fullgraph_compile.ops import SITE_OPS, operands
from fullgraph_compile.passes.common import expression, is_size, output_node, placeholders, value_of
from fullgraph_compile.passes.part import written


@dataclass(frozen=True)
class PieceCall:
    """Run kind ``kind`` on the values in slots ``inputs``; put its results in slots ``outputs``."""

    kind: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    drop: tuple[int, ...] = ()


@dataclass(frozen=True)
class SiteCall:
    """Attend at site ``site``: slots of the tensors of the call (q, k, v, sinks and slopes), None where absent."""

    site: int
    inputs: tuple[int | None, ...]
    output: int
    drop: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pieces:
    """The body as a list of steps over numbered slots; slots 0 .. n-1 are the placeholders.

    Attributes:
        kinds: the distinct pieces; each returns a tuple.
        examples: for each kind, the fake inputs of its first occurrence.
        interpret: kinds that must not be compiled, as they mutate a tensor that came from another piece.
        steps: pieces and attention calls in order; ``drop`` names the slots that no later step reads.
        outputs: slots of the body's outputs.
        slots: number of slots.
    """

    kinds: tuple[GraphModule, ...]
    examples: tuple[tuple[Any, ...], ...]
    interpret: frozenset[int]
    steps: tuple[PieceCall | SiteCall, ...]
    outputs: tuple[int, ...]
    slots: int

    @classmethod
    def whole(cls, body: GraphModule, examples: tuple[Any, ...]) -> Pieces:
        """The body as one piece, its attention calls inside."""
        n = len(examples)
        outputs = tuple(range(n, n + len(output_node(body).args[0])))  # type: ignore[arg-type]
        return cls(
            (body,), (examples,), frozenset(), (PieceCall(0, tuple(range(n)), outputs),), outputs, n + len(outputs)
        )


@dataclass
class _Part:
    """The nodes between two attention calls."""

    nodes: list[Node] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)


def split_pieces(body: GraphModule) -> Pieces:
    """Cut at the attention calls and outline structurally equal pieces."""
    slots: dict[Node, int] = {}
    for node in placeholders(body):
        slots[node] = len(slots)
    returned = list(output_node(body).args[0])  # type: ignore[arg-type]
    parts, sites = _parts(body)

    kinds: list[GraphModule] = []
    examples: list[tuple[Any, ...]] = []
    interpret: set[int] = set()
    known: dict[str, int] = {}
    steps: list[PieceCall | SiteCall] = []
    for i, part in enumerate(parts):
        if part.nodes:
            _bind(part, parts, sites, i, returned)
            key = _key(part)
            if key not in known:
                known[key] = len(kinds)
                kinds.append(_piece(body, part))
                examples.append(tuple(value_of(n) for n in part.inputs))
                if _writers(part.nodes, part.inputs):
                    interpret.add(known[key])
            for node in part.outputs:
                slots[node] = len(slots)
            steps.append(
                PieceCall(known[key], tuple(slots[n] for n in part.inputs), tuple(slots[n] for n in part.outputs))
            )
        if i < len(sites):
            site = sites[i]
            inputs = tuple(slots[n] if isinstance(n, Node) else None for n in operands(site.args))
            slots[site] = len(slots)
            steps.append(SiteCall(int(site.args[-1]), inputs, slots[site]))  # type: ignore[arg-type]
    outputs = tuple(slots[n] for n in returned)
    kept = set(outputs)
    return Pieces(tuple(kinds), tuple(examples), frozenset(interpret), _with_drops(steps, kept), outputs, len(slots))


def _parts(body: GraphModule) -> tuple[list[_Part], list[Node]]:
    parts, sites = [_Part()], []
    for node in body.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target in SITE_OPS:
            sites.append(node)
            parts.append(_Part())
        elif not _copied(node):
            parts[-1].nodes.append(node)
    return parts, sites


def _copied(node: Node) -> bool:
    """Sizes computed from sizes are copied into each piece that uses them, so that no piece returns a size."""
    return (
        is_size(value_of(node))
        and all(n.op == "placeholder" or _copied(n) for n in node.all_input_nodes)
        and not any(isinstance(value_of(n), torch.Tensor) for n in node.all_input_nodes)
    )


def _bind(part: _Part, parts: list[_Part], sites: list[Node], at: int, returned: list[Any]) -> None:
    """Find a part's inputs, in order of first use, and its outputs, and pull in the sizes that it uses."""
    inside = set(part.nodes)
    ordered: list[Node] = []
    copied: set[Node] = set()

    def pull(node: Node) -> None:
        for operand in node.all_input_nodes:
            if operand in inside or operand in copied:
                continue
            if operand.op != "placeholder" and _copied(operand):
                pull(operand)
                copied.add(operand)
                ordered.append(operand)
            elif operand not in part.inputs:
                part.inputs.append(operand)

    for node in part.nodes:
        pull(node)
        ordered.append(node)
    # A size that any input's shape names is bound first, so that a compiler reads it before it meets the shape.
    part.inputs.sort(key=lambda n: not is_size(value_of(n)))
    _bind_symbols(part)
    later = {*sites[at:], *returned}
    for other in parts[at + 1 :]:
        later.update(other.nodes)
    part.outputs = [n for n in part.nodes if n in returned or any(u in later for u in n.users)]
    part.nodes[:] = ordered


def _bind_symbols(part: _Part) -> None:
    """Add the size placeholders of symbols that occur in the shapes of the part's inputs."""
    if not part.inputs:
        return
    graph = part.inputs[0].graph
    bound = {expression(value_of(n)) for n in part.inputs if is_size(value_of(n))}
    wanted: set[Any] = set()
    for node in part.inputs:
        value = value_of(node)
        if isinstance(value, torch.Tensor):
            for size in value.shape:
                wanted |= getattr(expression(size), "free_symbols", set())
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        value = value_of(node)
        if isinstance(value, torch.SymInt) and expression(value) in wanted - bound:
            bound.add(expression(value))
            part.inputs.insert(0, node)


def _piece(body: GraphModule, part: _Part) -> GraphModule:
    graph = Graph()
    env: dict[Node, Node] = {}
    for i, node in enumerate(part.inputs):
        env[node] = graph.placeholder(f"in{i}")
        env[node].meta = dict(node.meta)
    for node in part.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in part.outputs))
    return GraphModule(body, graph)


def _key(part: _Part) -> str:
    """A text that two parts share exactly if one compiled piece serves both."""
    number = {n: f"%{i}" for i, n in enumerate([*part.inputs, *part.nodes])}
    storages: dict[int, int] = {}

    def shared(node: Node) -> str:
        """Inputs that are views of one storage must be so in every use of the piece."""
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return ""
        return str(storages.setdefault(value.untyped_storage()._cdata, len(storages)))

    def describe(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
            shape = ",".join(str(expression(s)) for s in value.shape)
            stride = ",".join(str(expression(s)) for s in value.stride())
            return f"{kind} {value.dtype} {value.device} [{shape}] [{stride}] {value.requires_grad}"
        if isinstance(value, torch.SymInt):
            return f"size {expression(value)}"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(describe, value))})"
        return repr(value)

    lines = [f"{number[n]}: {describe(value_of(n))} {shared(n)}" for n in part.inputs]
    for node in part.nodes:
        args = map_arg((node.args, node.kwargs), lambda n: _Name(number[n]))
        target = node.target if isinstance(node.target, str) else f"{node.target!r} {id(node.target)}"
        lines.append(f"{number[node]} = {node.op} {target} {args!r}: {describe(value_of(node))}")
    lines.append(" ".join(number[n] for n in part.outputs))
    return "\n".join(lines)


class _Name(str):
    """A node's number, printed without quotes, so that no constant of the graph can look like it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def written_inputs(gm: GraphModule) -> list[Node]:
    """Nodes that write to an input of the graph, or to a view of one."""
    inputs = placeholders(gm)
    return _writers([n for n in gm.graph.nodes if n not in inputs], inputs)


def _writers(nodes: list[Node], inputs: list[Node]) -> list[Node]:
    """Nodes that write to memory of ``inputs``."""
    outside = {value.untyped_storage()._cdata for n in inputs if isinstance(value := value_of(n), torch.Tensor)}

    def hit(target: Node) -> bool:
        value = value_of(target)
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in outside

    return [node for node in nodes if any(map(hit, written(node)))]


def _with_drops(steps: list[PieceCall | SiteCall], kept: set[int]) -> tuple[PieceCall | SiteCall, ...]:
    """Name the slots that each step is the last to read, so that the loop frees them at once.

    Under capture a value that is held too long is memory of the graph's pool, of the largest bucket.
    """
    seen = set(kept)
    reversed_steps: list[PieceCall | SiteCall] = []
    for step in reversed(steps):
        outputs = step.outputs if isinstance(step, PieceCall) else (step.output,)
        reads = {s for s in step.inputs if s is not None}
        drop = tuple(sorted((reads | set(outputs)) - seen))
        seen |= reads
        if isinstance(step, PieceCall):
            reversed_steps.append(PieceCall(step.kind, step.inputs, step.outputs, drop))
        else:
            reversed_steps.append(SiteCall(step.site, step.inputs, step.output, drop))
    return tuple(reversed(reversed_steps))
