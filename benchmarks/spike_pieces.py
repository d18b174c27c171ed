"""Which way to compile a decoder body whose attention is one op: the whole graph, or the pieces between the calls.

    python benchmarks/spike_pieces.py          # 4 layers of Qwen3-8B's shapes, random bf16 weights; about 20 GB of GPU
    python benchmarks/spike_pieces.py --cpu    # dry run with tiny sizes: compiles and errors, no times, no nodes

The op writes K and V into its site's flat cache and attends over two packed requests.  Every route is recorded in one
CUDA graph for each token count:

    HF eager          transformers' modules, op by op
    whole             Inductor over the whole graph, the op inside it
    pieces            the graph cut at the sites, equal pieces compiled once and called in turn
    linears           a floor: the projections alone; fused = q/k/v in one product, gate/up in one product

and the token dim of the compiled ones is

    backed            ``mark_dynamic``
    unbacked          ``mark_unbacked``
    rebound           traced unbacked, each piece then compiled with a backed symbol in a shape environment of its own

An error is the relative L2 norm of the last hidden state against the same weights in fp32, the largest of all sizes and
of two batches that one graph replays.  A time is the median of one replay, without staging, over rotating batches, the
routes interleaved, in the second of two passes.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.decorators import mark_dynamic, mark_unbacked
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule
from torch.nn import functional as F
from transformers import AutoModel, Qwen3Config, Qwen3Model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fullgraph_compile.compilers import compile_piece
from fullgraph_compile.ops import attention, set_direct_attention
from fullgraph_compile.passes.split_pieces import PieceCall, Pieces, split_pieces

console = Console(width=150)

ROUTES = ("pieces rebound", "pieces backed", "whole backed", "pieces unbacked", "whole unbacked")

Case = dict[str, Tensor]
"""Two packed requests: ids, positions and cache slots ``[tokens]`` int64, offsets ``[3]`` int32, on the device."""


class Batch:
    """The static buffers that every graph reads, and what the op computes on them."""

    def __init__(self, config: Qwen3Config, most: int, device: torch.device) -> None:
        self.vocabulary, self.capacity, self.device = config.vocab_size, 4 * most, device
        self.static = {name: torch.zeros_like(value) for name, value in self.draw(most, 0.5).items()}
        shape = (2, config.num_hidden_layers, self.capacity, config.num_key_value_heads, config.head_dim)
        self.cache = {t: torch.zeros(shape, dtype=t, device=device) for t in (torch.bfloat16, torch.float32)}
        set_direct_attention(self.attend)

    def draw(self, tokens: int, share: float) -> Case:
        first = max(1, round(tokens * share))
        return {
            "ids": torch.randint(self.vocabulary, (tokens,), device=self.device),
            "positions": torch.cat([torch.arange(n, device=self.device) for n in (first, tokens - first)]),
            "slots": torch.randperm(self.capacity, device=self.device)[:tokens],
            "offsets": torch.tensor([0, first, tokens], dtype=torch.int32, device=self.device),
        }

    def stage(self, case: Case) -> dict[str, Any]:
        """Write a batch into the buffers; returns the arguments of the model, which are views of them."""
        for name, value in case.items():
            self.static[name][: len(value)].copy_(value)
        tokens = len(case["ids"])
        # ``[:tokens][None]`` is dense, ``[None, :tokens]`` is not: Dynamo guards a backed size against the stride.
        ids, positions = (self.static[n][:tokens][None] for n in ("ids", "positions"))
        return {"input_ids": ids, "position_ids": positions, "use_cache": False}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        """What ``full_prefill::attention`` computes here; of its other arguments only scale and site are used."""
        scale, site, offsets = rest[2], rest[-1], self.static["offsets"]
        tokens = q.shape[0]
        for cache, new in zip(self.cache[k.dtype][:, site], (k, v), strict=True):
            cache.index_copy_(0, self.static["slots"][:tokens], new)
        if q.is_cuda and q.dtype == torch.bfloat16:
            from torch.nn.attention.varlen import varlen_attn

            # The bounds are numbers that a graph keeps, so they must hold for every batch of this many tokens.
            return varlen_attn(q, k, v, offsets, offsets, tokens, tokens, scale=scale, window_size=(-1, 0))
        rows, lens = [], offsets.diff().tolist()  # the fp32 reference and the dry run: a request at a time
        for request in zip(*(x.split(lens) for x in (q, k, v)), strict=True):
            heads_first = [x.transpose(0, 1)[None] for x in request]
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale, enable_gqa=True)
            rows.append(out[0].transpose(0, 1))
        return torch.cat(rows).contiguous()


def hf_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention(q, k, v, None, None, scaling, -1, 0, 0.0, module.layer_idx)[None], None


# transformers has no mask function of this name, so it builds no mask.
ALL_ATTENTION_FUNCTIONS.register("spike", hf_attention)


def build(layers: int, device: torch.device) -> Qwen3Model:
    tiny = device.type == "cpu"
    config = Qwen3Config(
        hidden_size=64 if tiny else 4096,
        intermediate_size=128 if tiny else 12288,
        num_hidden_layers=layers,
        num_attention_heads=4 if tiny else 32,
        num_key_value_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        vocab_size=128 if tiny else 1024,
        max_position_embeddings=40960,
    )
    with torch.device(device):
        model = AutoModel.from_config(config, attn_implementation="spike", dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms start as ones, which would hide a norm that lost its weight
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


class Route:
    """A Dynamo backend, its name two of the words above; it counts and times what it compiles."""

    def __init__(self, name: str) -> None:
        self.layout, self.dims = name.split()
        self.graphs = self.kinds = 0
        self.first_call = self.backend = 0.0
        self.run: Callable[..., Any]

    def compile(self, model: Qwen3Model, batch: Batch, case: Case) -> None:
        """Trace and compile with cold caches, then call once: Triton picks its configurations at this size."""
        torch._dynamo.reset()
        inputs = batch.stage(case)
        for name in ("input_ids", "position_ids"):
            inputs[name] = inputs[name].clone()
            if self.dims == "backed":
                mark_dynamic(inputs[name], 1)
            else:
                mark_unbacked(inputs[name], 1, shape_id="tokens", hint_override=len(case["ids"]))
        self.run = torch.compile(model, backend=self, fullgraph=True)
        start = time.perf_counter()
        with fresh_cache(delete=False):  # kernels are loaded from it later too
            self.run(**inputs)
            if case["ids"].is_cuda:
                torch.cuda.synchronize()
        self.first_call = time.perf_counter() - start

    def __call__(self, gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        start = time.perf_counter()
        pieces = split_pieces(gm) if self.layout == "pieces" else Pieces.whole(gm, tuple(examples))
        assert not pieces.interpret
        # compile_piece is what replaces unbacked symbols; compile_fx takes them as they are.
        inductor = (lambda *piece: compile_piece(*piece, "inductor")) if self.dims == "rebound" else compile_fx
        compiled = [inductor(kind, list(e)) for kind, e in zip(pieces.kinds, pieces.examples, strict=True)]
        scale = next(n.args[5] for n in gm.graph.nodes if n.target is attention)
        self.graphs, self.kinds = self.graphs + 1, self.kinds + len(compiled)
        self.backend += time.perf_counter() - start

        def run(*args: Any) -> tuple[Any, ...]:
            values: list[Any] = [*args, *[None] * (pieces.slots - len(args))]
            for step in pieces.steps:
                operands = [None if i is None else values[i] for i in step.inputs]
                if isinstance(step, PieceCall):
                    for slot, result in zip(step.outputs, compiled[step.kind](*operands), strict=True):
                        values[slot] = result
                else:
                    values[step.output] = attention(*operands, scale, -1, 0, 0.0, step.site)
                del operands
                for slot in step.drop:
                    values[slot] = None
            return tuple(values[slot] for slot in pieces.outputs)

        return run


def linears(model: Qwen3Model, tokens: int, fused: bool) -> Callable[[], Any]:
    """The projections of the model by cuBLAS, and nothing else."""
    weights: list[Tensor] = []
    for layer in model.layers:
        a, m = layer.self_attn, layer.mlp
        for group in ([a.q_proj, a.k_proj, a.v_proj], [a.o_proj], [m.gate_proj, m.up_proj], [m.down_proj]):
            matrices = [linear.weight for linear in group]
            weights += [torch.cat(matrices)] if fused else matrices
    rows = {w.shape[1]: w.new_empty(tokens, w.shape[1]).normal_() for w in weights}

    def run() -> None:
        for w in weights:
            F.linear(rows[w.shape[1]], w)

    return run


class Recorded:
    """One CUDA graph of ``run``; without CUDA a call stands for a replay."""

    def __init__(self, run: Callable[[], Any], device: torch.device) -> None:
        self.run, self.nodes = run, "-"  # run is kept, as the graph holds addresses of what it owns
        self.output: Any = None
        self.replay = self.call
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()  # what is made at a first call must not be made under capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.output = run()
            graph.instantiate()
            self.nodes, self.replay = count_nodes(graph), graph.replay

    def call(self) -> None:
        self.output = self.run()


def count_nodes(graph: torch.cuda.CUDAGraph) -> str:
    """Kernel nodes / all nodes."""
    driver, raw, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(raw, None, ctypes.byref(count)) == 0
    nodes, kind, kernels = (ctypes.c_void_p * count.value)(), ctypes.c_int(), 0
    assert driver.cuGraphGetNodes(raw, nodes, ctypes.byref(count)) == 0
    for node in nodes:
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kernels += kind.value == 0
    return f"{kernels}/{count.value}"


def worst_error(recorded: Recorded, batch: Batch, cases: list[Case], wanted: list[Tensor]) -> float:
    """The larger error of the first two batches; checks too that K went to the slots that the batch names."""
    found = []
    for case, want in reversed(list(zip(cases[:2], wanted, strict=True))):  # the batch of the capture comes last
        batch.stage(case)
        keys = batch.cache[torch.bfloat16][0, -1].fill_(float("nan"))
        recorded.replay()
        written = ~keys.isnan().flatten(1).any(-1)
        assert torch.equal(written.nonzero()[:, 0], case["slots"].sort().values)
        found.append(float((recorded.output.float() - want).norm() / want.norm()))
    return max(found)


def medians(graphs: dict[str, Recorded], batch: Batch, cases: list[Case], rounds: int = 40) -> dict[str, float]:
    """Replay time of each route in ms.  A batch is staged before each replay and not counted."""
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
    for i in range(rounds):
        for name, recorded in graphs.items():
            batch.stage(cases[i % len(cases)])
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            recorded.replay()
            end.record()
            marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(b.elapsed_time(e) for b, e in pairs) for name, pairs in marks.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="dry run with tiny sizes and two layers")
    cpu = parser.parse_args().cpu
    torch.manual_seed(0)
    device = torch.device("cpu" if cpu else "cuda")
    sizes, first = ([5, 8, 16], 8) if cpu else ([30, 64, 128, 512, 2048], 512)

    model = build(2 if cpu else 4, device)
    batch = Batch(model.config, max(sizes), device)
    cases = {t: [batch.draw(t, share) for share in (0.5, 0.3, 0.75, 0.6)] for t in sizes}
    exact = copy.deepcopy(model).float()
    wanted = {t: [exact(**batch.stage(case)).last_hidden_state for case in cases[t][:2]] for t in sizes}
    del exact

    graphs: dict[str, dict[int, Recorded]] = {}
    facts: dict[str, tuple[str, str]] = {}
    for name, fused in (("linears apart", False), ("linears fused", True)):
        graphs[name] = {t: Recorded(linears(model, t, fused), device) for t in sizes}
        facts[name] = ("-", "-")
    torch.compile(lambda x: x * 2)(torch.ones(64, device=device))  # starts the compiler's workers
    for name in ("HF eager", *ROUTES):
        console.print(name)
        route, run, cost = Route(name), model.forward, "-"
        if name in ROUTES:
            route.compile(model, batch, cases[first][0])
            run, cost = route.run, f"{route.first_call:.1f} ({route.backend:.1f}; {route.kinds})"
        graphs[name], worst = {}, 0.0
        for t in reversed(sizes):
            inputs = batch.stage(cases[t][0])
            graphs[name][t] = Recorded(lambda run=run, inputs=inputs: run(**inputs).last_hidden_state, device)
            worst = max(worst, worst_error(graphs[name][t], batch, cases[t], wanted[t]))
        facts[name] = (cost, f"{worst:.1e}")
        assert route.graphs <= 1, f"{name} was traced again for another size"

    table = Table("route", *(f"{t}: ms, nodes" for t in sizes), "first call, s (backend; kinds)", "error")
    times = {t: dict.fromkeys(graphs, float("nan")) for t in sizes}
    for t in [] if cpu else [*sizes, *sizes]:
        times[t] = medians({name: graphs[name][t] for name in graphs}, batch, cases[t])
    for name in graphs:
        table.add_row(name, *(f"{times[t][name]:.3f} {graphs[name][t].nodes}" for t in sizes), *facts[name])
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    console.print("CPU" if cpu else torch.cuda.get_device_name(), versions, "- nodes: kernels/all of a graph")
    console.print(table)


if __name__ == "__main__":
    main()
