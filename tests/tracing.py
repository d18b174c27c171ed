"""Trace a function or a module to the graph that Dynamo gives a backend, with its token dim marked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule

TOKENS = 12
"""The token count that tests trace with: dims of this size are token dims unless ``token_dims`` says otherwise."""


class _Traced(Exception):
    """Ends the call after tracing: the traced graph is never run."""


def trace(
    fn: Callable[..., Any],
    *inputs: Any,
    backed: bool = False,
    token_dims: Sequence[int | None] | None = None,
    **keywords: Any,
) -> tuple[GraphModule, sympy.Symbol]:
    """The graph of ``fn(*inputs, **keywords)`` and the symbol of its token count; nothing is executed.

    ``token_dims`` names the token dim of each tensor input, keywords last (None: it has none); without it, every dim
    of size ``TOKENS`` is one.  ``backed`` marks with ``mark_dynamic`` (a symbol with a value, guards allowed),
    otherwise with ``mark_unbacked``.  Where torch 2.11 cannot trace with an unbacked one, a backed one that is told
    nothing of its size takes its place, as ``fgc.compile`` does it.  The values of the placeholders are in
    ``gm.meta["example_inputs"]``.
    """
    if not backed and torch.__version__ < "2.13":
        try:
            return _trace(fn, inputs, keywords, token_dims, backed=False)
        except (torch._dynamo.exc.UserError, torch._dynamo.exc.Unsupported):
            with torch.fx.experimental._config.patch(backed_size_oblivious=True):
                return _trace(fn, inputs, keywords, token_dims, backed=True)
    return _trace(fn, inputs, keywords, token_dims, backed=backed)


def _trace(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    keywords: dict[str, Any],
    token_dims: Sequence[int | None] | None,
    *,
    backed: bool,
) -> tuple[GraphModule, sympy.Symbol]:
    leaves = [x for x in (*inputs, *keywords.values()) if isinstance(x, Tensor)]
    if token_dims is None:
        dims = [[d for d, size in enumerate(x.shape) if size == TOKENS] for x in leaves]
    else:
        dims = [[] if d is None else [d] for d in token_dims]
        if len(dims) != len(leaves):
            raise ValueError(f"token_dims names {len(dims)} inputs, the call has {len(leaves)} tensors")
    # A mark is an attribute of the tensor object: a fresh alias keeps it away from the caller's own.
    marked = iter(
        [
            _marked(x.detach() if not isinstance(x, torch.nn.Parameter) else x, d, backed)
            for x, d in zip(leaves, dims, strict=True)
        ]
    )
    args = [next(marked) if isinstance(x, Tensor) else x for x in inputs]
    kwargs = {name: next(marked) if isinstance(x, Tensor) else x for name, x in keywords.items()}

    traced: list[GraphModule] = []
    metas: list[dict[str, Any]] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        traced.append(gm)
        metas.extend(dict(n.meta) for n in gm.graph.nodes)
        gm.meta["example_inputs"] = list(example_inputs)

        def stop(*_: Any) -> Any:
            raise _Traced

        return stop

    torch._dynamo.reset()
    with contextlib.suppress(_Traced):
        torch.compile(fn, backend=backend, fullgraph=True)(*args, **kwargs)
    if len(traced) != 1:
        raise AssertionError(f"the function gave {len(traced)} graphs, not one")
    gm = traced[0]
    # Dynamo drops a placeholder's origin once the backend has returned; passes run before that.
    for node, meta in zip(gm.graph.nodes, metas, strict=True):
        node.meta = meta
    return gm, _token(gm)


def _marked(x: Tensor, dims: list[int], backed: bool) -> Tensor:
    for dim in dims:
        if backed:
            torch._dynamo.mark_dynamic(x, dim)
        else:
            torch._dynamo.decorators.mark_unbacked(x, dim, shape_id="tokens", hint_override=64)
    return x


def _token(gm: GraphModule) -> sympy.Symbol:
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    return size.node.expr
    raise AssertionError("no input of the graph has a token dim")
