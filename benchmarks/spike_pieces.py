"""Two ways to compile a decoder body whose attention is an opaque op: one Inductor graph, or pieces between the ops.

    python benchmarks/spike_pieces.py                    # 4 layers of Qwen3-8B shapes, random bf16 weights, CUDA
    python benchmarks/spike_pieces.py --log spike.log --code generated/
    python benchmarks/spike_pieces.py --cpu --routes "pieces rebound"     # tiny dry run: errors and compiles, no times

The op takes q, k, v and a site number, writes K and V into that site's flat cache and attends over the packed new
tokens of two requests.  Routes, each recorded in one CUDA graph per token count:

    eager      transformers eager, op by op
    whole      Inductor over the whole graph, the op inside it
    pieces     the Dynamo graph cut at the op nodes, structurally equal pieces compiled once and called in turn
    linears    floor: the projections alone through cuBLAS, apart, and with q/k/v and gate/up fused

The token dim, for the compiled ones:

    backed     ``mark_dynamic``
    unbacked   ``mark_unbacked`` with one shape id and a size hint
    rebound    traced unbacked; each piece is then compiled with its token symbol replaced by a backed one
    oblivious  ``mark_dynamic`` under ``backed_size_oblivious``

Each route's error is the relative L2 norm of the last hidden state against the same weights in fp32, on two batches
replayed through the same graph; the K cache of the last site is checked the same way, and that no other slot was
written.  Replay times are medians of CUDA events over rotating batches, routes interleaved, two passes.  Micro
benchmarks cover what ``torch.nn.attention.varlen`` does with empty request slots, rows without keys, and grouped KV
heads.  Needs about 20 GB of GPU memory.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

import argparse
import copy
import ctypes
import faulthandler
import gc
import hashlib
import inspect
import platform
import re
import statistics
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from torch import Tensor, fx
from torch._dynamo.decorators import mark_dynamic, mark_unbacked
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3Model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

START = time.perf_counter()
LOG: TextIO | None = None


def say(*words: object) -> None:
    line = f"[{time.perf_counter() - START:6.1f}] " + " ".join(map(str, words))
    print(line, flush=True)
    note(line)


def note(line: str) -> None:
    """Write to the log only."""
    if LOG is not None:
        LOG.write(line + "\n")
        LOG.flush()


# ---------------------------------------------------------------- the batch and the op


@dataclass(frozen=True)
class Case:
    """One batch of two packed requests; tensors on the device."""

    lens: tuple[int, int]
    ids: Tensor
    positions: Tensor
    slots: Tensor
    cu: Tensor


class Batch:
    """The static buffers that every recorded graph reads, and the flat KV cache of every site."""

    def __init__(self, config: Qwen3Config, tokens: int, device: torch.device) -> None:
        self.ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.slots = torch.zeros_like(self.ids)
        self.cu = torch.zeros(3, dtype=torch.int32, device=device)
        self.lens = (1, 1)
        self.cache_shape = (4 * tokens, config.num_key_value_heads, config.head_dim)
        self.caches: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        for site in range(config.num_hidden_layers):
            for dtype in (torch.bfloat16, torch.float32):
                self.cache(site, torch.empty(0, dtype=dtype, device=device))

    def stage(self, case: Case) -> None:
        tokens = sum(case.lens)
        self.ids[:tokens].copy_(case.ids)
        self.positions[:tokens].copy_(case.positions)
        self.slots[:tokens].copy_(case.slots)
        self.cu.copy_(case.cu)
        self.lens = case.lens

    def inputs(self, tokens: int) -> dict[str, Any]:
        return {"input_ids": self.ids[:tokens][None], "position_ids": self.positions[:tokens][None], "use_cache": False}

    def cache(self, site: int, like: Tensor) -> tuple[Tensor, Tensor]:
        key = (site, like.dtype)
        if key not in self.caches:
            self.caches[key] = (like.new_zeros(self.cache_shape), like.new_zeros(self.cache_shape))
        return self.caches[key]


BATCH: Batch

_library = torch.library.Library("spike", "DEF")
_library.define("attention(Tensor q, Tensor k, Tensor v, float scale, int site) -> Tensor")
ATTENTION = torch.ops.spike.attention.default


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, site: int) -> Tensor:
    keys, values = BATCH.cache(site, k)
    slots = BATCH.slots[: q.shape[0]]
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)
    if q.is_cuda and q.dtype == torch.bfloat16:
        from torch.nn.attention.varlen import varlen_attn

        bound = max(2, q.shape[0])
        return varlen_attn(q, k, v, BATCH.cu, BATCH.cu, bound, bound, scale=scale, window_size=(-1, 0))
    rows = [  # the reference: one request at a time, host lengths
        F.scaled_dot_product_attention(
            a.transpose(0, 1)[None],
            b.transpose(0, 1)[None],
            c.transpose(0, 1)[None],
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
        for a, b, c in zip(q.split(BATCH.lens), k.split(BATCH.lens), v.split(BATCH.lens), strict=True)
        if a.shape[0]
    ]
    return torch.cat(rows).contiguous()


_library.impl("attention", _attention, "CompositeExplicitAutograd")


@torch.library.register_fake("spike::attention", lib=_library)
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, scale: float, site: int) -> Tensor:
    return q.new_empty(q.shape)


def spike_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    assert mask is None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return ATTENTION(q, k, v, scaling, module.layer_idx)[None], None


# A name that transformers has no mask function for: no mask is built.
ALL_ATTENTION_FUNCTIONS.register("spike_attn", spike_attention)


# ---------------------------------------------------------------- cutting at the op nodes


@dataclass
class Piece:
    graph_module: fx.GraphModule
    examples: list[Any]
    key: str
    inputs: list[fx.Node]
    outputs: list[fx.Node]


def symbols_of(value: object) -> set[str]:
    if isinstance(value, torch.SymInt):
        return {str(s) for s in value.node.expr.free_symbols}
    if isinstance(value, Tensor):
        return {s for size in (*value.shape, *value.stride()) for s in symbols_of(size)}
    return set()


def describe(value: object) -> str:
    if isinstance(value, Tensor):
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        return f"{kind} {value.dtype} {value.device} {list(map(str, value.shape))} {list(map(str, value.stride()))}"
    return repr(value) if not isinstance(value, (tuple, list)) else str([describe(v) for v in value])


def cut(gm: fx.GraphModule) -> list[Piece | fx.Node]:
    """The steps of the graph in order: pieces and op nodes."""
    groups: list[list[fx.Node]] = [[]]
    steps: list[list[fx.Node] | fx.Node] = [groups[0]]
    for node in gm.graph.nodes:
        if node.target is ATTENTION:
            groups.append([])
            steps += [node, groups[-1]]
        elif node.op not in ("placeholder", "output", "get_attr"):
            groups[-1].append(node)
    sizes = [n for n in gm.graph.nodes if n.op == "placeholder" and isinstance(n.meta["example_value"], torch.SymInt)]
    return [step if isinstance(step, fx.Node) else outline(gm, step, sizes) for step in steps]


def outline(gm: fx.GraphModule, nodes: list[fx.Node], sizes: list[fx.Node]) -> Piece:
    inside = set(nodes)
    inputs = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside))
    outputs = [n for n in nodes if any(u not in inside for u in n.users)]
    needed: set[str] = set().union(*(symbols_of(i.meta["example_value"]) for i in inputs))
    bound: list[fx.Node] = []  # one size placeholder per symbol, in front: backed graphs carry a symbol twice
    for size in sizes:
        names = symbols_of(size.meta["example_value"])
        if names & needed:
            needed -= names
            bound.append(size)
    inputs = bound + [i for i in inputs if i not in bound]

    graph, new = fx.Graph(), {}
    key: list[str] = []
    for position, old in enumerate(inputs):
        new[old] = graph.placeholder(f"in_{position}")
        new[old].meta["example_value"] = old.meta["example_value"]
        key.append(describe(old.meta["example_value"]))
    order = {node: position for position, node in enumerate([*inputs, *nodes])}
    for old in nodes:
        new[old] = graph.node_copy(old, lambda n: new[n])
        args = fx.map_arg((old.args, old.kwargs), lambda n: f"%{order[n]}")  # type: ignore[arg-type, return-value]
        key.append(f"{old.op} {old.target} {args} -> {describe(old.meta.get('example_value'))}")
    graph.output(tuple(new[o] for o in outputs))
    key.append(str([order[o] for o in outputs]))
    assert all(isinstance(o.meta["example_value"], Tensor) for o in outputs)
    piece = fx.GraphModule(gm, graph)
    return Piece(piece, [i.meta["example_value"] for i in inputs], "\n".join(key), inputs, outputs)


def rebind(examples: list[Any], hint: int) -> tuple[FakeTensorMode, list[Any]]:
    """The same inputs under a new fake mode, the token symbol backed by ``hint``.

    Inductor on torch 2.11 gives every dependency that has an unbacked symbol a size of zero, so it fuses by no score.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    symbol = env.create_symbol(hint, ConstantSource("tokens"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)

    def size(value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        expr = value.node.expr
        expr = env.simplify(expr.xreplace(dict.fromkeys(expr.free_symbols, symbol)))
        return env.create_symintnode(expr, hint=int(expr.xreplace({symbol: hint})))

    with mode:
        return mode, [
            torch.empty_strided(
                [size(n) for n in e.shape], [size(n) for n in e.stride()], dtype=e.dtype, device=e.device
            )
            if isinstance(e, Tensor)
            else size(e)
            for e in examples
        ]


# ---------------------------------------------------------------- the two backends


@dataclass
class Compiled:
    """One compiled body and what its compilation took."""

    name: str
    run: Callable[..., Any]
    backend_calls: int = 0
    compiles: int = 0
    hint: int | None = None  # compile pieces with a backed symbol of this hint, whatever Dynamo traced
    guards: list[str] = field(default_factory=list)
    compile_seconds: list[float] = field(default_factory=list)
    first_call: float = 0.0
    backend_seconds: float = 0.0
    sources: list[str] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)  # graphs hold raw addresses of what these own

    def inductor(self, gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        start = time.perf_counter()
        if self.hint is None:
            fn = compile_fx(gm, examples)
        else:
            mode, fakes = rebind(examples, self.hint)
            with tracing(TracingContext(mode)):
                fn = compile_fx(gm, fakes)
            self.guards += [str(guard.expr) for guard in mode.shape_env.guards]
        self.compiles += 1
        self.compile_seconds.append(time.perf_counter() - start)
        self.keep.append(fn)
        return fn

    def whole(self, gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        start = time.perf_counter()
        self.backend_calls += 1
        fn = self.inductor(gm, examples)
        self.backend_seconds += time.perf_counter() - start
        return fn

    def pieces(self, gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        start = time.perf_counter()
        self.backend_calls += 1
        steps = cut(gm)
        kinds: dict[str, Callable[..., Any]] = {}
        fns: list[Callable[..., Any]] = []
        for step in steps:
            if isinstance(step, fx.Node):
                fns.append(ATTENTION)
                continue
            if step.key not in kinds:
                kinds[step.key] = self.inductor(step.graph_module, step.examples)
            fns.append(kinds[step.key])
        loop = piece_loop(gm, steps, fns)
        self.backend_seconds += time.perf_counter() - start
        return loop


def piece_loop(gm: fx.GraphModule, steps: list[Piece | fx.Node], fns: list[Any]) -> Callable[..., Any]:
    """Call pieces and attention in turn; a value leaves the table at its last use."""
    number: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        number[node] = len(number)
    holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    final = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    results = [number[n] if isinstance(n, fx.Node) else None for n in final]
    program: list[tuple[Any, list[int | float], list[bool], list[int]]] = []
    last: dict[int, int] = {}
    refs: list[Any]
    for index, (step, fn) in enumerate(zip(steps, fns, strict=True)):
        if isinstance(step, fx.Node):
            refs = [number[a] if isinstance(a, fx.Node) else a for a in step.args]
            program.append((fn, refs, [isinstance(a, fx.Node) for a in step.args], [number[step]]))
        else:
            refs = [number[n] for n in step.inputs]
            program.append((fn, refs, [True] * len(refs), [number[n] for n in step.outputs]))
        _, refs, live, made = program[-1]
        for ref, is_node in zip(refs, live, strict=True):
            if is_node:
                last[int(ref)] = index
        for ref in made:
            last.setdefault(ref, index)
    drops: dict[int, list[int]] = defaultdict(list)
    for ref, index in last.items():
        if ref not in results:
            drops[index].append(ref)
    first = [number[h] for h in holders]

    def loop(*args: Any) -> tuple[Any, ...]:
        table: dict[Any, Any] = dict(zip(first, args, strict=True))
        for index, (fn, refs, live, made) in enumerate(program):
            out = fn(*[table[r] if is_node else r for r, is_node in zip(refs, live, strict=True)])
            if isinstance(out, Tensor):
                out = (out,)
            table.update(zip(made, out, strict=True))
            del out
            for ref in drops[index]:
                del table[ref]
        return tuple(None if r is None else table[r] for r in results)

    return loop


def compile_body(name: str, model: Qwen3Model, route: str, dims: str, hint: int, case: Case) -> Compiled:
    """Compile with every cache off and call once with ``case``."""
    torch._dynamo.reset()
    gc.collect()
    compiled = Compiled(name, lambda: None, hint=hint if dims == "rebound" else None)
    compiled.run = torch.compile(model, backend=getattr(compiled, route), fullgraph=True)
    BATCH.stage(case)
    inputs = {k: v.clone() if isinstance(v, Tensor) else v for k, v in BATCH.inputs(sum(case.lens)).items()}
    for key in ("input_ids", "position_ids"):
        if dims in ("backed", "oblivious"):
            mark_dynamic(inputs[key], 1)
        else:
            mark_unbacked(inputs[key], 1, shape_id="tokens", hint_override=hint)
    GraphLowering.save_output_code = staticmethod(compiled.sources.append)  # type: ignore[assignment]
    start = time.perf_counter()
    try:
        with fresh_cache(delete=False), fx_config.patch(backed_size_oblivious=dims == "oblivious"):
            compiled.run(**inputs)
            synchronize()
    finally:
        GraphLowering.save_output_code = None
    compiled.first_call = time.perf_counter() - start
    return compiled


# ---------------------------------------------------------------- graphs and time


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass
class Recorded:
    replay: Callable[[], None]
    output: Callable[[], Any]
    nodes: str = ""
    keep: Any = None


NODE_KINDS = {0: "kernel", 1: "memcpy", 2: "memset"}


def record(run: Callable[[], Any], cpu: bool = False) -> Recorded:
    """Two warm-ups and one capture; without CUDA the call itself stands for the replay."""
    if cpu:
        box: list[Any] = [None]

        def again() -> None:
            box[0] = run()

        return Recorded(again, lambda: box[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        output = run()
    graph.instantiate()
    return Recorded(graph.replay, lambda: output, count_nodes(graph), (graph, run))


def count_nodes(graph: torch.cuda.CUDAGraph) -> str:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
        assert driver.cuGraphGetNodes(raw, None, ctypes.byref(count)) == 0
        nodes = (ctypes.c_void_p * count.value)()
        assert driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count)) == 0
        kinds: Counter[str] = Counter()
        for node in nodes:
            kind = ctypes.c_int(-1)
            assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
            kinds[NODE_KINDS.get(kind.value, f"type {kind.value}")] += 1
        return " + ".join(f"{n} {k}" for k, n in kinds.most_common())
    except Exception as error:
        return f"? ({error!r})"


def interleave(routes: dict[str, Recorded], cases: list[Case], rounds: int) -> dict[str, float]:
    """Median replay time of each route in ms: one replay of each route a round, the batch changed every round."""
    if not torch.cuda.is_available():
        return dict.fromkeys(routes, float("nan"))
    marks: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for index in range(rounds):
        for name, recorded in routes.items():
            BATCH.stage(cases[index % len(cases)])
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            recorded.replay()
            end.record()
            marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(b.elapsed_time(e) for b, e in pairs[5:]) for name, pairs in marks.items()}


def per_call(run: Callable[[int], Any], calls: int = 24, rounds: int = 20) -> float:
    """Microseconds of one call, from a graph that holds ``calls`` of them."""
    recorded = record(lambda: [run(i) for i in range(calls)])
    recorded.replay()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        recorded.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in times) * 1000 / calls


def kernels(recorded: Recorded, label: str) -> str:
    """Kernels of one replay by name, to the log; their number and the sum of their times, returned."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            recorded.replay()
        torch.cuda.synchronize()
    rows = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
    rows.sort(key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows) / 3
    launches = sum(e.count for e in rows) / 3
    note(f"--- kernels of {label}: {launches:.0f} launches, {total:.1f} us")
    for e in rows:
        note(f"{e.self_device_time_total / 3:9.1f} us {e.count / 3:5.1f} x  {e.key[:150]}")
    return f"{launches:.0f} launches {total:.0f} us"


def error(value: Tensor, reference: Tensor) -> float:
    return ((value.float() - reference.float()).norm() / reference.float().norm()).item()


# ---------------------------------------------------------------- varlen facts


def varlen_facts(device: torch.device, table: list[str]) -> None:
    import torch.nn.attention.varlen as varlen

    say("varlen_attn", inspect.signature(varlen.varlen_attn))
    say("aten", torch.ops.aten._flash_attention_forward.default._schema)
    heads, kv_heads, size = 32, 8, 128

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def offsets(*values: int) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    def expected(q: Tensor, k: Tensor, v: Tensor, lens: tuple[int, ...], causal: bool = True) -> Tensor:
        parts = [
            F.scaled_dot_product_attention(
                *(x.float().transpose(0, 1)[None] for x in (a, b, c)), is_causal=causal, enable_gqa=True
            )[0].transpose(0, 1)
            for a, b, c in zip(q.split(lens), k.split(lens), v.split(lens), strict=True)
        ]
        return torch.cat(parts)

    # Rows of one more request that has queries but no keys.
    for rows, n1, n in ((64, 20, 33), (512, 100, 300), (2048, 1000, 1500)):
        q, k, v = draw(rows, heads, size), draw(rows, kv_heads, size), draw(rows, kv_heads, size)
        for window in ((-1, 0), (-1, -1)):
            want = expected(q[:n], k[:n], v[:n], (n1, n - n1), window == (-1, 0))
            for words, cu_q, cu_k in (
                ("extra request without keys", offsets(0, n1, n, rows), offsets(0, n1, n, n)),
                ("no extra request (control)", offsets(0, n1, n), offsets(0, n1, n)),
            ):
                poison = torch.full((rows, heads, size), float("nan"), device=device, dtype=torch.bfloat16)
                address = poison.data_ptr()
                del poison
                out = varlen.varlen_attn(q, k, v, cu_q, cu_k, rows, rows, window_size=window)
                tail = out[n:]
                bad = int(tail.isnan().flatten(1).any(-1).sum())
                state = "zeros" if bool((tail == 0).all()) else f"{bad} NaN rows of {rows - n}"
                say(
                    f"rows {rows} {words} window {window}: tail {state}, same block {out.data_ptr() == address}, "
                    f"error of real rows {error(out[:n], want):.1e}"
                )
                if window == (-1, 0):
                    table.append(f"| {rows} rows, {n} real, {words} | {state} | {error(out[:n], want):.1e} |")

    # V as a strided view, which a fused projection would give.
    q, k, wide = draw(512, heads, size), draw(512, kv_heads, size), draw(512, 3 * kv_heads, size)
    cu = offsets(0, 200, 512)
    out = varlen.varlen_attn(q, k, wide[:, kv_heads : 2 * kv_heads], cu, cu, 512, 512, window_size=(-1, 0))
    say(f"strided V: error {error(out, expected(q, k, wide[:, kv_heads : 2 * kv_heads], (200, 312))):.1e}")

    for rows in (64, 512, 2048):
        cells = varlen_times(rows, draw, offsets, (heads, kv_heads, size))
        text = ", ".join(f"{words} {us:.1f}" for words, us in cells.items())
        say(f"rows {rows} us per call: {text}")
        table.append(f"| us at {rows} rows | {text} | |")


def varlen_times(
    rows: int, draw: Callable[..., Tensor], offsets: Callable[..., Tensor], shape: tuple[int, int, int]
) -> dict[str, float]:
    """Microseconds: exact offsets against many empty slots, the fill that varlen_attn adds, the KV write."""
    from torch.nn.attention.varlen import varlen_attn

    heads, kv_heads, size = shape
    q = [draw(rows, heads, size) for _ in range(4)]
    k = [draw(rows, kv_heads, size) for _ in range(4)]
    v = [draw(rows, kv_heads, size) for _ in range(4)]
    half, real = rows // 2, rows - rows // 4
    exact = offsets(0, half, rows)

    def attend(cu_q: Tensor, max_q: int, cu_k: Tensor, max_k: int) -> float:
        return per_call(
            lambda i: varlen_attn(q[i % 4], k[i % 4], v[i % 4], cu_q, cu_k, max_q, max_k, window_size=(-1, 0))
        )

    times = {"2 exact": attend(exact, half, exact, half), "2, max_q = bucket": attend(exact, rows, exact, rows)}
    for slots in (8, 16, 32, 128):
        cu = offsets(0, half, *[rows] * (slots - 1))
        times[f"{slots} slots"] = attend(cu, rows, cu, rows)
    cu_q, cu_k = offsets(0, real // 2, *[real] * 31, rows), offsets(0, real // 2, *[real] * 32)
    times["32 slots and a quarter of the rows in a request without keys"] = attend(cu_q, rows, cu_k, rows)
    times["2, max_k = 40960"] = attend(exact, rows, exact, 40960)
    times["aten op, 2 exact"] = per_call(
        lambda i: torch.ops.aten._flash_attention_forward(
            q[i % 4], k[i % 4], v[i % 4], exact, exact, half, half, 0.0, True, False
        )
    )
    keys = torch.zeros(8192, kv_heads, size, device=exact.device, dtype=torch.bfloat16)
    values, where = torch.zeros_like(keys), torch.randperm(8192, device=exact.device)[:rows]

    def copy_rows(i: int) -> None:
        keys.index_copy_(0, where, k[i % 4])
        values.index_copy_(0, where, v[i % 4])

    def put_rows(i: int) -> None:
        keys[where] = k[i % 4]
        values[where] = v[i % 4]

    times["K and V write, index_copy_"] = per_call(copy_rows)
    times["K and V write, index_put_"] = per_call(put_rows)
    return times


# ---------------------------------------------------------------- floors


def linear_floor(model: Qwen3Model, tokens: int, fused: bool) -> Callable[[], Any]:
    first = model.layers[0]
    weight = first.self_attn.q_proj.weight
    x = torch.randn(tokens, weight.shape[1], device=weight.device, dtype=weight.dtype)
    a = torch.randn(tokens, first.self_attn.o_proj.weight.shape[1], device=weight.device, dtype=weight.dtype)
    h = torch.randn(tokens, first.mlp.down_proj.weight.shape[1], device=weight.device, dtype=weight.dtype)
    work: list[tuple[Tensor, Tensor]] = []
    for layer in model.layers:
        att, mlp = layer.self_attn, layer.mlp
        groups = [[att.q_proj, att.k_proj, att.v_proj], [mlp.gate_proj, mlp.up_proj]]
        weights = [[torch.cat([m.weight for m in g])] if fused else [m.weight for m in g] for g in groups]
        work += [(x, w) for w in weights[0]] + [(a, att.o_proj.weight)]
        work += [(x, w) for w in weights[1]] + [(h, mlp.down_proj.weight)]

    def run() -> None:
        for value, matrix in work:
            F.linear(value, matrix)

    return run


# ---------------------------------------------------------------- the comparison


def build(args: argparse.Namespace, device: torch.device) -> Qwen3Model:
    tiny = args.cpu
    config = Qwen3Config(
        hidden_size=64 if tiny else 4096,
        intermediate_size=128 if tiny else 12288,
        num_hidden_layers=args.layers,
        num_attention_heads=4 if tiny else 32,
        num_key_value_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        vocab_size=128 if tiny else 1024,
        max_position_embeddings=40960,
    )
    config._attn_implementation = "spike_attn"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3Model(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def draw_cases(tokens: int, vocabulary: int, capacity: int, device: torch.device) -> list[Case]:
    cases = []
    for share in (0.5, 0.3, 0.75, 0.6):
        first = max(1, round(tokens * share))
        lens = (first, tokens - first)
        positions = torch.cat([torch.arange(n, device=device) for n in lens])
        cases.append(
            Case(
                lens,
                torch.randint(0, vocabulary, (tokens,), device=device),
                positions,
                torch.randperm(capacity, device=device)[:tokens],
                torch.tensor([0, first, tokens], dtype=torch.int32, device=device),
            )
        )
    return cases


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """One failed part must not cost the rest of the run."""
    try:
        yield
    except Exception:
        say(f"FAILED: {what}: {sys.exc_info()[1]!r}"[:600])
        note(traceback.format_exc())


def triton_summary(sources: list[str]) -> str:
    lines = []
    for source in sources:
        names = re.findall(r"^(triton_\w+) = async_compile", source, re.M)
        hints = [re.sub(r"\s+", "", h) for h in re.findall(r"size_hints=(\{[^}]*\})", source)]
        calls = len(re.findall(r"\.run\(|extern_kernels\.\w+\(|torch\.ops\.spike", source))
        digest = hashlib.sha256(re.sub(r"size_hints=\{[^}]*\}|#.*", "", source).encode()).hexdigest()[:8]
        lines.append(
            f"{len(names)} triton kernels, {calls} calls, code {digest}: "
            + "; ".join(f"{n} {h}" for n, h in zip(names, hints, strict=False))
        )
    return "\n    ".join(lines)


@dataclass(frozen=True)
class Plan:
    name: str
    route: str  # a backend of ``Compiled``
    dims: str
    hint: int
    first: int  # tokens of the first call, at which Triton configurations are chosen


class Comparison:
    """The model, its batches and references, and every route that was recorded."""

    def __init__(self, model: Qwen3Model, sizes: list[int], shown: list[int], device: torch.device) -> None:
        global BATCH
        self.model, self.sizes, self.shown, self.cpu = model, sizes, shown, device.type == "cpu"
        BATCH = Batch(model.config, max(sizes), device)
        self.capacity, self.last_site = BATCH.cache_shape[0], model.config.num_hidden_layers - 1
        vocabulary = model.config.vocab_size
        self.cases = {t: draw_cases(t, vocabulary, self.capacity, device) for t in [1, *sizes]}
        self.references: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        exact = copy.deepcopy(model).float()
        for tokens in [1, *sizes]:
            for index in (0, 1):
                case = self.cases[tokens][index]
                BATCH.stage(case)
                hidden = exact(**BATCH.inputs(tokens)).last_hidden_state.clone()
                cached = BATCH.cache(self.last_site, hidden)[0][case.slots].clone()
                self.references[tokens, index] = (hidden, cached)
        self.routes: dict[str, dict[int, Recorded]] = {}
        self.errors: dict[str, str] = {}
        self.costs: dict[str, str] = {}
        self.keep: list[Compiled] = []

    def admit(self, name: str, run: Callable[..., Any]) -> None:
        """Record at every size, largest first, and check two batches through each graph."""
        worst, worst_cache = 0.0, 0.0
        graphs: dict[int, Recorded] = {}
        for tokens in reversed(self.sizes):
            BATCH.stage(self.cases[tokens][0])
            inputs = BATCH.inputs(tokens)
            graphs[tokens] = record(lambda i=inputs: run(**i).last_hidden_state, self.cpu)  # type: ignore[misc]
            for index in (1, 0):
                case = self.cases[tokens][index]
                hidden, cached = self.references[tokens, index]
                BATCH.stage(case)
                keys = BATCH.caches[self.last_site, torch.bfloat16][0].fill_(float("nan"))
                graphs[tokens].replay()
                worst = max(worst, error(graphs[tokens].output(), hidden))
                worst_cache = max(worst_cache, error(keys[case.slots], cached))
                untouched = int(keys.isnan().all(-1).all(-1).sum())
                assert untouched == self.capacity - tokens, f"{untouched} cache slots untouched"
        self.routes[name] = graphs
        self.errors[name] = f"{worst:.1e} / {worst_cache:.1e}"
        nodes = ", ".join(f"{t}: {graphs[t].nodes}" for t in self.shown)
        say(f"{name}: worst error of hidden / last site's K {self.errors[name]}; nodes {nodes}")

    def compile(self, plan: Plan, code: Path | None) -> None:
        body = compile_body(plan.name, self.model, plan.route, plan.dims, plan.hint, self.cases[plan.first][0])
        self.keep.append(body)
        seconds = "+".join(f"{s:.1f}" for s in body.compile_seconds)
        self.costs[plan.name] = f"{body.first_call:.1f} ({body.backend_seconds:.1f}; {body.compiles}: {seconds})"
        say(f"{plan.name}: first call s (backend; compiles) {self.costs[plan.name]}")
        note("    " + triton_summary(body.sources))
        if body.guards:
            note("    guards: " + "; ".join(sorted(set(body.guards))))
        if code:
            code.mkdir(exist_ok=True)
            (code / (plan.name.replace(" ", "_") + ".py.txt")).write_text("\n\n#====\n\n".join(body.sources))
        self.admit(plan.name, body.run)
        say(f"{plan.name}: {body.backend_calls} graph from Dynamo after {self.sizes}")
        BATCH.stage(self.cases[1][0])
        hidden = body.run(**BATCH.inputs(1)).last_hidden_state
        found = error(hidden, self.references[1, 0][0])
        say(f"{plan.name} with one token, no CUDA graph: error {found:.1e}, {body.backend_calls} graphs from Dynamo")

    def time(self, rounds: int) -> dict[int, list[dict[str, float]]]:
        """Two passes of medians in ms for every size; without CUDA there is nothing to time."""
        times = {}
        for tokens in self.sizes:
            chosen = {name: graphs[tokens] for name, graphs in self.routes.items()}
            times[tokens] = [interleave(chosen, self.cases[tokens], rounds) for _ in range(2)]
        return times

    def table(self, times: dict[int, list[dict[str, float]]]) -> list[str]:
        head = [f"{t} tokens, ms" for t in self.sizes]
        lines = [f"| route | {' | '.join(head)} | first call s (backend; compiles) | error hidden / K |"]
        lines.append("|---" * (len(head) + 3) + "|")
        for name in self.routes:
            cells = [" / ".join(f"{run[name]:.3f}" for run in times[t]) for t in self.sizes]
            lines.append(f"| {name} | {' | '.join(cells)} | {self.costs.get(name, '-')} | {self.errors[name]} |")
        lines += ["", f"| graph nodes | {' | '.join(map(str, self.shown))} |", "|---" * (len(self.shown) + 1) + "|"]
        return lines + [
            f"| {name} | {' | '.join(graphs[t].nodes for t in self.shown)} |" for name, graphs in self.routes.items()
        ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=65, help="replays behind one median, the first five dropped")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no further route is compiled")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--code", type=Path, help="folder for the generated code")
    parser.add_argument("--routes", nargs="*", help="names of the compiled routes; default all")
    return parser.parse_args()


def main() -> None:
    global LOG
    args = arguments()
    LOG = args.log.open("w") if args.log else None
    device = torch.device("cpu" if args.cpu else "cuda")
    faulthandler.enable()
    torch.manual_seed(0)
    machine = f"torch {torch.__version__}, transformers {transformers.__version__}, python {platform.python_version()}"
    if not args.cpu:
        machine += f", CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}, {os.cpu_count()} CPU cores"
    say(machine)

    sizes = [5, 8, 16] if args.cpu else [30, 64, 128, 512, 2048]
    shown = sizes[1:] if args.cpu else [64, 512, 2048]
    small, middle, large = shown[0], sizes[1] if args.cpu else 512, shown[-1]
    plans = [
        Plan("pieces rebound", "pieces", "rebound", middle, middle),
        Plan("pieces backed", "pieces", "backed", middle, middle),
        Plan("whole backed", "whole", "backed", middle, middle),
        Plan("pieces unbacked", "pieces", "unbacked", middle, middle),
        Plan("whole unbacked", "whole", "unbacked", middle, middle),
        Plan("pieces oblivious", "pieces", "oblivious", middle, middle),
        Plan(f"pieces rebound hint {small}", "pieces", "rebound", small, small),
        Plan(f"pieces rebound hint {large}", "pieces", "rebound", large, large),
        Plan(f"pieces unbacked hint {small}", "pieces", "unbacked", small, small),
        Plan(f"pieces unbacked hint {large}", "pieces", "unbacked", large, large),
    ]
    facts: list[str] = []
    with torch.no_grad():
        if not args.cpu:
            with guarded("varlen facts"):
                varlen_facts(device, facts)
        comparison = Comparison(build(args, device), sizes, shown, device)
        with guarded("eager"):
            comparison.admit("eager", comparison.model.forward)
        for name, fused in (("linears", False), ("linears fused", True)):
            comparison.routes[name] = {t: record(linear_floor(comparison.model, t, fused), args.cpu) for t in sizes}
            comparison.errors[name] = "-"

        start = time.perf_counter()  # the first compile of a process also starts the compiler's workers
        torch.compile(lambda x: F.silu(x) * x.sum(-1, keepdim=True))(torch.randn(64, 64, device=device))
        synchronize()
        say(f"tool chain started in {time.perf_counter() - start:.1f} s")
        for plan in plans:
            if args.routes and plan.name not in args.routes:
                continue
            if time.perf_counter() - START > args.deadline:
                say(f"skipped {plan.name}: out of time")
                continue
            with guarded(plan.name):
                comparison.compile(plan, args.code)

        times = comparison.time(args.rounds)
        for tokens in [] if args.cpu else shown:
            for name, graphs in comparison.routes.items():
                with guarded(f"profile {name}"):
                    # A replay under the offsets of a larger batch would read past the end.
                    BATCH.stage(comparison.cases[tokens][0])
                    say(f"{name} at {tokens}: {kernels(graphs[tokens], f'{name} at {tokens}')}")

    table = [machine, "", *comparison.table(times)]
    if facts:
        table += ["", "| varlen | tail rows | error |", "|---|---|---|", *facts]
    for line in table:
        print(line)
        note(line)


if __name__ == "__main__":
    main()
