"""What turns a piece of the body into something callable: Inductor, AOTAutograd alone, or the FX graph itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols

from fullgraph_compile.passes.autocast_regions import forward_of, unwound
from fullgraph_compile.passes.split_products import MOST_TOKENS, split_products

log = logging.getLogger("fullgraph_compile")

Compiled = Callable[..., Sequence[Any]]

# Not a failure: AOTAutograd asks Dynamo to trace again with a number made constant.  It must reach Dynamo.
TraceAgain = torch._dynamo.exc.RestartAnalysis

# The sizes that Inductor chooses tiles for: of any token count, and of few.
HINT, FEW_HINT = 512, 64
# For few tokens kernels that do not need each other are one launch, as the norm and rotary of query and of key are:
# what they do takes less than to begin (docs/performance-log.md).
FEW = {"combo_kernels": True}


def warm_workers(compiler: str, device: torch.device) -> None:
    """Start the processes in which Inductor compiles kernels side by side, so that they are ready once it has any.

    torch does so for its own backend only; without them the kernels are compiled one after the other.  It takes a
    while, so it is called before tracing, and does not wait.
    """
    if compiler != "inductor" or device.type != "cuda":
        return
    try:
        from torch._inductor.async_compile import maybe_warm_pool
    except ImportError:  # another torch: they start at the first kernel
        return
    maybe_warm_pool()


def cache_counts() -> tuple[int, int]:
    """How often this process found what it compiled in torch's caches on disk so far, and how often it did not."""
    from torch._dynamo.utils import counters

    # One that AOTAutograd's cache holds counts in Inductor's too; an aot_eager piece is in neither.
    found = counters["inductor"]
    return int(found["fxgraph_cache_hit"]), int(found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"])


def compile_piece(gm: GraphModule, examples: Sequence[Any], compiler: str, *, captured: bool = True) -> Compiled:
    """Compile one piece once, symbolically, with an inference-only pipeline.

    Must be called inside the backend call, where Dynamo's tracing context lives.

    Args:
        gm: a graph that returns a tuple.
        examples: its fake inputs; sizes are SymInts.
        compiler: "inductor", "aot_eager" or "eager".
        captured: whether it is a part of graphs, for which it may be compiled more than once.
    """
    if compiler == "eager":
        return forward_of(gm)
    with torch.no_grad(), unwound(gm):
        if compiler == "aot_eager":
            from functorch.compile import nop
            from torch._functorch.aot_autograd import aot_module_simplified

            return aot_module_simplified(gm, list(examples), fw_compiler=nop, inference_compiler=nop)
        at = _token_count_at(examples) if captured and _on_gpu(examples) else None
        # Before the compiler changes the graph.
        split = None if at is None else split_products(gm)
        unbacked = any(free_unbacked_symbols(e) for e in examples if isinstance(e, (Tensor, torch.SymInt)))
        compiled = _inductor_backed(gm, examples) if unbacked else _inductor(gm, examples)
        return compiled if split is None or at is None else _for_few(split, examples, at, compiled)


def _inductor(gm: GraphModule, examples: Sequence[Any], **patches: Any) -> Compiled:
    from torch._inductor.compile_fx import compile_fx

    # One graph is captured around all pieces; Inductor must not capture any of its own.
    patches["triton.cudagraphs"] = False
    return cast(Compiled, compile_fx(gm, list(examples), config_patches=patches))


def _for_few(split: GraphModule, examples: Sequence[Any], at: int, others: Compiled) -> Compiled:
    """Compile once more, for few tokens, with the products that those take.

    Args:
        at: which input is the token count.
        others: what runs for more.
    """
    try:
        few = _inductor_backed(split, examples, hint=FEW_HINT, **FEW)
    except TraceAgain:
        raise
    except Exception as error:
        log.info("products of few tokens stay whole: %r", error)
        return others
    return lambda *args: (few if args[at] <= MOST_TOKENS else others)(*args)


def _on_gpu(examples: Sequence[Any]) -> bool:
    return any(isinstance(e, Tensor) and e.is_cuda for e in examples)


def _token_count_at(examples: Sequence[Any]) -> int | None:
    """The input that is the token count; None where sizes follow from none, or from more than one."""
    sizes: list[Any] = [e for e in examples if isinstance(e, torch.SymInt)]
    sizes += [n for e in examples if isinstance(e, Tensor) for n in e.shape if isinstance(n, torch.SymInt)]
    symbols = {symbol for n in sizes for symbol in n.node.expr.free_symbols}
    for i, e in enumerate(examples):
        if isinstance(e, torch.SymInt) and {e.node.expr} == symbols:
            return i
    return None


def _inductor_backed(gm: GraphModule, examples: Sequence[Any], hint: int = HINT, **patches: Any) -> Compiled:
    """Compile with the unbacked token count replaced by a backed one.

    Inductor (seen in torch 2.11) takes a dependency with an unbacked size for empty when it decides what to fuse, and
    makes 14 kernels of a decoder piece in place of 5.  The backed count lives in a shape environment of its own, whose
    guards nobody else sees, so they are checked here.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    symbol = env.create_symbol(hint, ConstantSource("tokens"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)

    def size(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        expr = env.simplify(value.node.expr.xreplace(dict.fromkeys(value.node.expr.free_symbols, symbol)))
        return env.create_symintnode(expr, hint=int(expr.xreplace({symbol: hint})))

    with mode:
        backed = [
            torch.empty_strided(
                [size(n) for n in e.shape], [size(n) for n in e.stride()], dtype=e.dtype, device=e.device
            )
            if isinstance(e, Tensor)
            else size(e)
            for e in examples
        ]
    with tracing(TracingContext(mode)):
        compiled = _inductor(gm, backed, **patches)
    at = next(i for i, e in enumerate(examples) if isinstance(e, torch.SymInt))
    guards = [g.expr for g in env.guards]
    holds: dict[int, bool] = {}
    as_traced = forward_of(gm)

    def run(*args: Any) -> Sequence[Any]:
        tokens = args[at]
        if tokens not in holds:
            holds[tokens] = all(bool(g.xreplace({symbol: tokens})) for g in guards)
        return compiled(*args) if holds[tokens] else as_traced(*args)

    return run
