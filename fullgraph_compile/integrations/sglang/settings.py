"""The switch and the options of the SGLang plugin, read from the environment and checked before anything is touched."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fullgraph_compile.options import COMPILERS, UNSAFE, Options, disabled

SWITCH = "FULLGRAPH_COMPILE_SGLANG"
OPTIONS = "FULLGRAPH_COMPILE_SGLANG_OPTIONS"
PLANS = ("graph", "host", "sglang")
ATTENTIONS = ("auto", "triton", "reference", "sglang")

# Options of the package that have a knob of SGLang's own, or no meaning, here.
_ELSEWHERE = {
    "max_tokens": "SGLang's --cuda-graph-max-bs-prefill",
    "buckets": "SGLang's --cuda-graph-bs-prefill",
    "lengths": "SGLang's --cuda-graph-bs-prefill",
    "request_slots": 'SGLang\'s --cuda-graph-config \'{"prefill": {"full_prefill_max_req": 16}}\'',
    "context_length": "SGLang's --context-length",
    "graphs": "SGLang's --cuda-graph-backend-prefill",
    "memory_budget": "SGLang's --mem-fraction-static",
}
_MEANINGLESS = {
    "max_padding": "SGLang itself sends a batch that would be padded more than twofold to eager",
    "clone_outputs": "SGLang owns the outputs of its graphs",
    "fuse_projections": "SGLang's projections are merged already (qkv_proj, gate_up_proj)",
    "progress": "SGLang shows its own progress of the capture",
}


class BadSetting(ValueError):
    """A variable of the environment that is not valid; the message says which values are."""


@dataclass(frozen=True)
class Settings:
    """What the environment asks of the plugin.

    Attributes:
        on: whether the plugin does anything.
        strict: a failure at start-up ends SGLang, in place of a log line and SGLang's own graphs.
        compiler: what makes kernels of the pieces between attention calls: "inductor", "aot_eager" or "eager".
        unsafe: what becomes of a body whose padding is not proven safe: "compiled" lets SGLang run prefill eagerly, at
            exact sizes; "error" ends SGLang.
        plan: who plans FlashInfer's prefill: "host" = the plugin, from lengths on the host, with a plan for each
            bucket; "graph" = the same, and the graph computes what else attention reads, so that a plan alone prepares
            a replay; "sglang" = SGLang as it is.
        measured_routes: time each bucket once after the capture, and let one that the compiled body is slower in take
            SGLang's own graph, or none.
        attention: what attends in the graphs: "triton" or "reference" = our own, on SGLang's KV pool; "sglang" =
            SGLang's attention backend; "auto" = "triton" on CUDA where it can, else SGLang's.
    """

    on: bool = False
    strict: bool = False
    compiler: str = "inductor"
    unsafe: str = "compiled"
    plan: str = "host"
    measured_routes: bool = True
    attention: str = "auto"

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings of this process.

        Raises:
            BadSetting: a value is not valid; nothing is changed.
        """
        environment = os.environ if environment is None else environment
        switch = environment.get(SWITCH, "").strip().lower()
        if switch not in ("", "0", "1", "strict"):
            raise BadSetting(f"{SWITCH}={environment[SWITCH]!r} is not one of 0, 1, strict (unset = 0)")
        given = _options(environment.get(OPTIONS, ""))
        if switch in ("", "0") or disabled():
            return cls()
        strict = given.pop("strict", False) or switch == "strict"
        return replace(cls(on=True, strict=strict), **given)

    @property
    def compile_options(self) -> Options:
        """The package's options for compiling pieces."""
        return Options(compiler=self.compiler, unsafe=self.unsafe, strict=self.strict, progress=False)


def _options(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadSetting(f'{OPTIONS} is not JSON ({error}); an example: \'{{"compiler": "inductor"}}\'') from None
    if not isinstance(given, dict):
        raise BadSetting(f"{OPTIONS} must be a JSON object of names and values, not {type(given).__name__}")
    for name, value in given.items():
        _check(name, value)
    return given


def _check(name: str, value: Any) -> None:
    switch = (True, False)
    valid = {
        "strict": switch, "compiler": COMPILERS, "unsafe": UNSAFE, "plan": PLANS, "measured_routes": switch,
        "attention": ATTENTIONS,
    }  # fmt: skip
    if name in _ELSEWHERE:
        raise BadSetting(f"{OPTIONS}: {name!r} is set by {_ELSEWHERE[name]}")
    if name in _MEANINGLESS:
        raise BadSetting(f"{OPTIONS}: {name!r} means nothing here: {_MEANINGLESS[name]}")
    if name not in valid:
        near = difflib.get_close_matches(name, valid, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise BadSetting(f"{OPTIONS}: unknown option {name!r}{hint} Valid options: {', '.join(valid)}")
    if not any(value is v or (isinstance(v, str) and value == v) for v in valid[name]):
        raise BadSetting(
            f"{OPTIONS}: {name}={json.dumps(value)} is not one of {', '.join(map(json.dumps, valid[name]))}"
        )
