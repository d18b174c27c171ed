"""What turns a piece of the body into something callable: Inductor, AOTAutograd alone, or the FX graph itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch._dynamo
from torch.fx import GraphModule

Compiled = Callable[..., Sequence[Any]]

# Not a failure: AOTAutograd asks Dynamo to trace again with a number made constant.  It must reach Dynamo.
TraceAgain = torch._dynamo.exc.RestartAnalysis


def compile_piece(gm: GraphModule, examples: Sequence[Any], compiler: str) -> Compiled:
    """Compile one piece once, symbolically, with an inference-only pipeline.

    Must be called inside the backend call, where Dynamo's tracing context lives.

    Args:
        gm: a graph that returns a tuple.
        examples: its fake inputs; sizes are SymInts.
        compiler: "inductor", "aot_eager" or "eager".
    """
    if compiler == "eager":
        return gm.forward
    with torch.no_grad():
        if compiler == "aot_eager":
            from functorch.compile import nop
            from torch._functorch.aot_autograd import aot_module_simplified

            return aot_module_simplified(gm, list(examples), fw_compiler=nop, inference_compiler=nop)
        from torch._inductor.compile_fx import compile_fx

        # One graph is captured around all pieces; Inductor must not capture any of its own.
        return cast(Compiled, compile_fx(gm, list(examples), config_patches={"triton.cudagraphs": False}))
