"""One way to prefill with SGLang, in a process of its own: its times, and what it answers.  See sglang_prefill.py."""

from __future__ import annotations

import cProfile
import json
import logging
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY = {
    **QWEN3_8B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "torch_dtype": "float32",
}  # fmt: skip
SHAPES = [(1, 30), (4, 32), (1, 64), (1, 128), (8, 64), (1, 512), (1, 2048)]
BUCKETS = [16, 32, 64, 128, 256, 512, 1024, 2048]
SLOTS, PROMPTS, MOST_PER_BATCH = 16, 200, 8
# The order in which they run: where time is short, the last are left out.
ROUTES = {
    "disabled": ("disabled", None),
    "full": ("full", None),
    "ours": ("full", {}),
    "breakable": ("breakable", None),
    "ours, every bucket": ("full", {"attention": "triton", "measured_routes": False}),
    "ours, SGLang's attention": ("full", {"attention": "sglang", "measured_routes": False}),
    "ours, SGLang's plan": ("full", {"attention": "sglang", "plan": "sglang", "measured_routes": False}),
    "ours, plan in graph": ("full", {"attention": "sglang", "plan": "graph", "measured_routes": False}),
}
HEADS = {"served": "as served", "fp32": "by an fp32 head"}


class Route:
    """A model runner of SGLang's with one prefill backend."""

    def __init__(self, backend: str, cpu: bool) -> None:
        import torch
        from sglang.srt.plugins import load_plugins

        self.torch, self.cpu = torch, cpu
        self.synchronize = (lambda: None) if cpu else torch.cuda.synchronize
        load_plugins()
        import sglang.benchmark.one_batch as bench
        import sglang.srt.model_executor.model_runner as runners
        from sglang.srt.server_args import PortArgs, ServerArgs

        self.bench = bench
        folder = tempfile.mkdtemp()
        Path(folder, "config.json").write_text(json.dumps(TINY if cpu else QWEN3_8B))
        prefill: dict[str, Any] = {"backend": backend, "bs": BUCKETS}
        if backend == "full":
            prefill["full_prefill_max_req"] = SLOTS
        args = ServerArgs(
            model_path=folder, load_format="dummy", skip_tokenizer_init=True, disable_radix_cache=True,
            attention_backend="torch_native" if cpu else "flashinfer", device="cpu" if cpu else "cuda",
            mem_fraction_static=0.1 if cpu else 0.5, disable_decode_cuda_graph=True, chunked_prefill_size=2048,
            cuda_graph_config={"prefill": prefill}, context_length=8192, grammar_backend="none",
            sampling_backend="pytorch", max_running_requests=64, **({"max_total_tokens": 16384} if cpu else {}),
        )  # fmt: skip
        bench._set_envs_and_config(args)
        bench.get_tokenizer = lambda *a, **k: None
        bench.suppress_other_loggers = lambda *a, **k: None
        if hasattr(bench, "publish"):
            rank = bench.spawn_world_rank(args, tp_rank=0, pp_rank=0)
            bench.publish(args, role="scheduler", ranks=bench.SpawnRanks(world_rank=rank, gpu_id=0))
        captured: dict[str, Any] = {}
        capture = runners.capture_cuda_graphs

        def noted(*a: Any, **k: Any) -> Any:
            captured["graphs"] = capture(*a, **k)
            return captured["graphs"]

        runners.capture_cuda_graphs = noted
        start = time.perf_counter()
        self.runner = bench.load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner
        self.start_up = time.perf_counter() - start
        graphs = captured["graphs"].prefill
        self.capture_seconds, self.graph_gib = float(graphs.capture_time), float(graphs.memory_usage_gb)
        self.seed()

    def seed(self) -> None:
        """Weights whose logits are decided: SGLang's dummy ones are next to nothing.  Addresses stay."""
        torch = self.torch
        layers = len(self.runner.model.model.layers)
        generator = torch.Generator(self.runner.device).manual_seed(0)
        with torch.no_grad():
            for name, p in self.runner.model.named_parameters():
                if p.dim() < 2:
                    p.copy_(1 + 0.1 * torch.randn(p.shape, generator=generator, device=p.device))
                    continue
                p.normal_(0.0, p.shape[-1] ** -0.5, generator=generator)
                if "embed" in name:
                    p.mul_(p.shape[-1] ** 0.5)
                elif "o_proj" in name or "down_proj" in name:
                    p.mul_(layers**-0.5)
                elif "lm_head" in name:
                    # A few tokens are likely, as in a real model: with equal rows most of the best two are level.
                    p.mul_(torch.exp(1.5 * torch.randn(p.shape[0], 1, generator=generator, device=p.device)))

    def batch(self, prompts: list[list[int]]) -> Any:
        """A batch as the scheduler would build it, caught on its way into the model runner."""
        bench_runner, caught = self.bench._TorchBenchRunner(self.runner), {}
        bench_runner.clear()
        forward = self.runner.forward
        self.runner.forward = lambda batch, *a, **k: (caught.update(batch=batch), forward(batch, *a, **k))[1]
        try:
            make = self.bench.prepare_synthetic_inputs_for_latency_test
            self.bench.extend(make(0, 0, custom_inputs=prompts), self.runner)
        finally:
            self.runner.forward = forward
        return caught["batch"]

    def time(self, requests: int, tokens: int) -> dict[str, float]:
        """Milliseconds of a call, and of its parts where a whole graph replays."""
        batch = self.batch(random_prompts([tokens] * requests, seed=tokens))
        backend = getattr(self.runner.prefill_cuda_graph_runner, "backend", None)
        whole_graph = any(c.__name__ == "FullCudaGraphBackend" for c in type(backend).__mro__)
        graphs, seen = backend._graphs if whole_graph else {}, {}
        if whole_graph:
            replay = backend.replay

            def noted(key: Any, *args: Any, **kwargs: Any) -> Any:
                seen.update(key=key, at=time.perf_counter())
                return replay(key, *args, **kwargs)

            backend.replay = noted
        whole, staging = [], []
        with self.torch.no_grad():
            for i in range(36):
                self.synchronize()
                begin = time.perf_counter()
                output = self.runner.forward(batch)
                self.synchronize()
                if i >= 6:
                    whole.append((time.perf_counter() - begin) * 1e3)
                    staging.append((seen.get("at", begin) - begin) * 1e3)
            result = {"ms": statistics.median(whole), "replayed": float(bool(output.can_run_graph))}
            graph = graphs.get(seen["key"]) if seen else None
            if hasattr(graph, "replay"):
                alone = []
                for _ in range(12):
                    self.synchronize()
                    begin = time.perf_counter()
                    graph.replay()
                    self.synchronize()
                    alone.append((time.perf_counter() - begin) * 1e3)
                result.update(staging_ms=statistics.median(staging), graph_ms=statistics.median(alone))
        if whole_graph:
            del backend.replay
        return result

    def profile(self, out: Path) -> None:
        """Where the host's time of a call goes: staging's three parts, then every function."""
        batch = self.batch(random_prompts([30], seed=30))
        runner, attention = self.runner.prefill_cuda_graph_runner, self.runner.attn_backend
        spent: Counter[str] = Counter()

        def clocked(holder: Any, name: str) -> None:
            inner = getattr(holder, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                result = inner(*args, **kwargs)
                spent[name] += time.perf_counter() - begin
                return result

            setattr(holder, name, call)

        def calls() -> None:
            with self.torch.no_grad():
                for _ in range(50):
                    self.runner.forward(batch)
                    self.synchronize()

        calls()
        profiler = cProfile.Profile()
        profiler.runcall(calls)
        if hasattr(runner, "load_batch") and hasattr(attention, "init_forward_metadata_out_graph"):
            clocked(runner, "load_batch")
            clocked(runner, "execute")
            clocked(attention, "init_forward_metadata_out_graph")
            updater = getattr(attention, "indices_updater_prefill", None)
            if updater is not None:
                clocked(updater, "call_begin_forward")
            for wrapper in getattr(attention, "full_cg_prefill_wrappers", None) or ():
                clocked(wrapper, "begin_forward")
            calls()
        with open(out, "w") as file:
            file.write(f"us a call, 1x30: { {name: round(s / 50 * 1e6, 1) for name, s in spent.items()} }\n")
            for order in ("tottime", "cumulative"):
                pstats.Stats(profiler, stream=file).sort_stats(order).print_stats(45)

    def answer(self, batches: list[list[list[int]]]) -> tuple[list[dict[str, Any]], Counter[bool]]:
        """For each prompt the best tokens and their logits, by each LM head; and how many batches replayed."""
        answers: list[dict[str, Any]] = []
        replayed: Counter[bool] = Counter()
        processor = self.runner.model.logits_processor
        with self.torch.no_grad():
            for prompts in batches:
                batch, best = self.batch(prompts), {}
                for head in HEADS:
                    processor.use_fp32_lm_head = head == "fp32"
                    output = self.runner.forward(batch)
                    best[head] = output.logits_output.next_token_logits.float().topk(64, -1)
                replayed[bool(output.can_run_graph)] += 1
                for i in range(len(prompts)):
                    answers.append(
                        {h: {"tokens": b.indices[i].tolist(), "logits": b.values[i].tolist()} for h, b in best.items()}
                    )
        processor.use_fp32_lm_head = False
        return answers, replayed


def random_prompts(lengths: list[int], seed: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(10, 10000, (n,), generator=generator).tolist() for n in lengths]


def prompt_batches(count: int, seed: int) -> list[list[list[int]]]:
    """Prompts of 4 to 120 tokens, in batches of one to eight."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 121, (count,), generator=generator).tolist()
    prompts, batches = random_prompts(lengths, seed=seed + 1), []
    while prompts:
        n = int(torch.randint(1, MOST_PER_BATCH + 1, (1,), generator=generator))
        batches.append(prompts[:n])
        prompts = prompts[n:]
    return batches


def run_route(name: str, out: Path, cpu: bool) -> None:
    """Write what is known after each step, so that a route that ends early still tells what it has."""
    sys.path.insert(0, str(ROOT))
    logging.basicConfig(level=logging.INFO)
    started = time.perf_counter()
    backend, options = ROUTES[name]
    route = Route(backend, cpu)
    result: dict[str, Any] = {
        "versions": versions(), "start_up_s": route.start_up, "capture_s": route.capture_seconds,
        "graph_gib": route.graph_gib, "times": {},
    }  # fmt: skip

    def save(**more: Any) -> None:
        result.update(more, process_s=time.perf_counter() - started)
        out.write_text(json.dumps(result))

    # Twice: for some seconds after its start a process is slower (compile workers, clocks), which no server notices.
    for _ in range(2):
        result["first_times"] = dict(result["times"])
        for requests, tokens in SHAPES:
            result["times"][f"{requests}x{tokens}"] = route.time(requests, tokens)
            save()
    if options is not None and not cpu:
        import fullgraph_compile

        save(report=str(fullgraph_compile.report()))
    if os.environ.get("SGLANG_BENCH_PROFILE"):
        route.profile(out.with_name("profile.txt"))
    parts = {
        "": prompt_batches(PROMPTS, seed=1),
        "more_": prompt_batches(int(os.environ.get("SGLANG_BENCH_MORE", 0)), 11),
    }
    for part, batches in parts.items():
        if name == "disabled":
            save(**{f"{part}alone": route.answer([[prompt] for batch in batches for prompt in batch])[0]})
        answers, replayed = route.answer(batches)
        counts = {f"{part}replayed": replayed[True], f"{part}batches": sum(replayed.values())}
        save(**{f"{part}answers": answers}, **counts)
    os._exit(0)


def versions() -> str:
    import sglang
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    try:
        import flashinfer

        kernels = f", FlashInfer {flashinfer.__version__}"
    except ImportError:
        kernels = ""
    return f"{device}, SGLang {sglang.__version__}, torch {torch.__version__}{kernels}, Python {sys.version.split()[0]}"
