"""Doubles for a machine without a GPU: of SGLang's full prefill backend, and of attention with static metadata.

SGLang's runner, buffers, padding, metadata calls and eager tail are the real ones.  A "graph" is the compiled program
with the very tensors that it was captured with; where the body is not compiled, it is the body's own forward on the
static buffers, never on the batch's own tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fullgraph_compile.integrations.sglang.body import HostedProgram

VARIABLE = "SGLANG_FULL_DOUBLE"
"""JSON: buckets (token counts), slots (request slots; null = SGLang's own rule), static (attention has metadata),
backend (of prefill, as it is when SGLang captures)."""


class Recorded(dict[str, Any]):
    """A "graph": what was captured; a plain dict could not be watched for its end."""


class Double:
    """The doubles, and what they saw.

    Attributes:
        events: ("out", in_capture, requests) of metadata calls; ("body", bucket) of captured calls; ("replay", bucket).
    """

    def __init__(
        self, buckets: list[int], slots: int | None = 4, static: bool = True, backend: str = "full"
    ) -> None:  # fmt: skip
        self.buckets, self.slots, self.static, self.backend = buckets, slots, static, backend
        self.events: list[tuple[Any, ...]] = []
        self._last: dict[str, Any] = {}

    def install(self) -> None:
        """Put the doubles in the place of the real things, in this process."""
        from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as runners
        from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend as Full

        double = self

        def start(self: Any, runner: Any, **kwargs: Any) -> None:
            # Nothing that only some releases keep.
            self._graphs, self._outputs, self._doubled = {}, {}, runner

        @contextlib.contextmanager
        def capture_session(self: Any, stream: Any) -> Iterator[None]:
            yield

        def capture_one(self: Any, shape_key: Any, forward_fn: Any, *args: Any, **kwargs: Any) -> None:
            for _ in range(3):
                double._last.clear()
                double.events.append(("body", int(shape_key.size)))
                forward_fn()
            self._graphs[shape_key] = Recorded(double._last)

        def replay(self: Any, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
            double.events.append(("replay", int(shape_key.size)))
            return double.run(self._graphs[shape_key], self._doubled.layer_model, static_forward_batch)

        Full.__init__, Full.capture_session, Full.capture_one, Full.replay = start, capture_session, capture_one, replay
        runners.graph_capture = lambda *args, **kwargs: contextlib.nullcontext(SimpleNamespace(stream=None))
        runners.get_or_create_global_graph_capture_stream = lambda *args: None
        self._record_programs()
        self._static_metadata()
        self._attention_op_on_cpu()

    def _record_programs(self) -> None:
        program_call = HostedProgram.__call__
        self._call = program_call

        def recorded(program: HostedProgram, *inputs: Any) -> list[Any]:
            self._last.update(program=program, inputs=inputs, modules=list(program.sites.modules))
            return program_call(program, *inputs)

        HostedProgram.__call__ = recorded  # type: ignore[method-assign]

    def run(self, graph: dict[str, Any], body: Any, batch: Any) -> Any:
        if not graph:
            return type(body).forward(body, batch.input_ids, batch.positions, batch)
        program = graph["program"]
        program.sites.modules, program.sites.batch = graph["modules"], batch
        return self._call(program, *graph["inputs"])[0]

    def _static_metadata(self) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        if not self.static:
            return

        def out_of_graph(attention: Any, forward_batch: Any, in_capture: bool = False) -> None:
            self.events.append(("out", in_capture, len(forward_batch.seq_lens)))
            attention.init_forward_metadata(forward_batch)

        TorchNativeAttnBackend.init_forward_metadata_out_graph = out_of_graph

    def _attention_op_on_cpu(self) -> None:
        """Older releases send attention through an op that they register for CUDA alone."""
        from sglang.srt.layers import radix_attention

        computed = getattr(radix_attention, "_unified_attention_with_output_impl", None)
        if computed is None:
            return

        def unified(q, k, v, output, save_kv_cache, layer_id, *, use_mha_companion=False, **kwargs):  # type: ignore
            computed(q, k, v, output, save_kv_cache, layer_id, use_mha_companion, False, **kwargs)

        self._library = torch.library.Library("sglang", "FRAGMENT")
        self._library.impl("unified_attention_with_output", unified, "CPU")

    def configure(self, model_runner: Any) -> None:
        """What a user would have set: torch_native attention turns graphs off before."""
        from fullgraph_compile.integrations.sglang.plugin import _published

        config = _published(model_runner.server_args)
        config.backend, config.bs, config.full_prefill_max_req = self.backend, list(self.buckets), self.slots


def register() -> None:
    """A plugin of SGLang's: the doubles in each of its processes, as ``VARIABLE`` says."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    double = Double(**json.loads(os.environ[VARIABLE]))
    double.install()

    def capture(original: Any, *args: Any, **kwargs: Any) -> Any:
        double.configure(kwargs["model_runner"])
        return original(*args, **kwargs)

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_cuda_graphs",
        capture,
        HookType.AROUND,
    )
