"""A tiny model in SGLang's own ModelRunner, in this process: one for each process, as SGLang's state is global."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.sglang.double import Double

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
CONTEXT, BUCKETS, SLOTS = 64, [4, 8, 16, 32, 64, 128, 512], 4
VOCABULARY = 512


def config_folder(kind: str) -> str:
    """A folder with the configuration of a two-layer model."""
    config = {
        "architectures": [ARCHITECTURES[kind]], "model_type": kind, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "tie_word_embeddings": False, "torch_dtype": "float32", "hidden_act": "silu", "attention_bias": False,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    folder = tempfile.mkdtemp(prefix="sglang_model_")
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)
    return folder


def server_arguments(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "model_path": config_folder(kind), "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu",
        "attention_backend": "torch_native", "mem_fraction_static": 0.1, "max_total_tokens": 2048, "dtype": "float32",
        "chunked_prefill_size": 256, "context_length": CONTEXT, "grammar_backend": "none",
        "sampling_backend": "pytorch", "max_running_requests": 8, **more,
    }  # fmt: skip


def seed(model: Any) -> None:
    """Weights whose outputs differ: with SGLang's dummy ones they are next to nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.normal_(0.0 if "bias" in name else 1.0, 0.1, generator=generator)


class OneModel:
    """A model runner with doubles in place of graphs; the plugin as the environment says."""

    def __init__(self, kind: str, **double: Any) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        import sglang.benchmark.one_batch as bench
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
        from sglang.srt.server_args import PortArgs, ServerArgs

        self.bench, self.setup = bench, cuda_graph_setup
        self.double = Double(**{"buckets": BUCKETS, "slots": SLOTS, **double})
        self.double.install()
        args = ServerArgs(**server_arguments(kind, disable_radix_cache=True))
        bench.suppress_other_loggers = lambda *a, **k: None
        bench.get_tokenizer = lambda *a, **k: None
        bench._set_envs_and_config(args)
        if hasattr(bench, "publish"):
            rank = bench.spawn_world_rank(args, tp_rank=0, pp_rank=0)
            bench.publish(args, role="scheduler", ranks=bench.SpawnRanks(world_rank=rank, gpu_id=0))
        # Graphs are captured by each test.
        captured, ModelRunner.init_cuda_graphs = ModelRunner.init_cuda_graphs, lambda *a, **k: None
        try:
            self.runner = bench.load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner
        finally:
            ModelRunner.init_cuda_graphs = captured
        seed(self.runner.model)

    @property
    def body(self) -> Any:
        return self.runner.model.model

    def capture(self, **double: Any) -> Any:
        """Capture prefill anew; the runner that SGLang got."""
        for name, value in double.items():
            setattr(self.double, name, value)
        self.double.events.clear()
        self.double.configure(self.runner)
        self.runner.init_cuda_graphs()
        return self.runner.prefill_cuda_graph_runner

    @property
    def plugin(self) -> Any:
        """The plugin of this process; None = it is off."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        for _, hook, _ in HookRegistry._hooks.get(self.setup.__name__ + ".capture_prefill_graph", []):
            return hook.__self__
        return None

    @property
    def report(self) -> Any:
        return self.plugin.reports[-1]

    def batch(self, prompts: Sequence[Sequence[int]]) -> Any:
        """A batch as the scheduler would build it, caught on its way into the model runner."""
        runner, caught = self.bench._TorchBenchRunner(self.runner), {}
        runner.clear()
        forward = self.runner.forward
        self.runner.forward = lambda batch, *a, **k: (caught.update(batch=batch), forward(batch, *a, **k))[1]
        decide = getattr(self.runner.prefill_cuda_graph_runner, "can_run_graph", None)
        self.runner.prefill_cuda_graph_runner.can_run_graph = lambda batch: False
        try:
            reqs = self.bench.prepare_synthetic_inputs_for_latency_test(0, 0, custom_inputs=[list(p) for p in prompts])
            self.bench.extend(reqs, self.runner)
        finally:
            self.runner.forward = forward
            self.runner.prefill_cuda_graph_runner.can_run_graph = decide
        return caught["batch"]

    @torch.no_grad()
    def forward(self, batch: Any) -> tuple[Tensor, bool]:
        """Next-token logits ``[R, vocabulary]`` and whether a graph replayed."""
        output = self.runner.forward(batch)
        return output.logits_output.next_token_logits.clone(), bool(output.can_run_graph)

    def eager(self, batch: Any) -> Tensor:
        runner = self.runner.prefill_cuda_graph_runner
        decide = runner.can_run_graph
        runner.can_run_graph = lambda batch: False
        try:
            logits, replayed = self.forward(batch)
        finally:
            runner.can_run_graph = decide
        assert not replayed
        return logits


def prompts(*lengths: int, first: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths) + first)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
