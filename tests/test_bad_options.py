"""A bad option is an error that has the wrong value and what is valid, before anything is compiled or changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import fullgraph_compile as fgc
from tests.good_calls import GOOD, MODELS, WAYS, call, check_good_calls, compiled, per_request, unchanged
from tests.models import T2

TAPE = {"graphs": "tape", "compiler": "eager"}
BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "unknown option": ({"bukets": [8]}, ValueError, ["'bukets'", "'buckets'", "max_tokens", "clone_outputs"]),
    "unlike any option": ({"speed": 11}, ValueError, ["'speed'", "max_tokens", "buckets", "progress"]),
    "no buckets": ({"buckets": []}, ValueError, ["buckets=[]", "at least one token count", "None"]),
    "zero bucket": ({"buckets": [8, 0]}, ValueError, ["holds 0", "positive"]),
    "negative bucket": ({"buckets": [-8, 16]}, ValueError, ["holds -8", "positive"]),
    "float bucket": ({"buckets": [8, 16.5]}, TypeError, ["16.5", "not an integer"]),
    "text bucket": ({"buckets": [8, "16"]}, TypeError, ["'16'", "not an integer"]),
    "one bucket, no list": ({"buckets": 16}, TypeError, ["buckets=16", "list of positive integers"]),
    "max_tokens below": ({"max_tokens": 4, "buckets": [8, 16]}, ValueError, ["max_tokens=4", "smallest bucket, 8"]),
    "tape with inductor": (
        {"graphs": "tape", "compiler": "inductor"},
        ValueError,
        ["graphs='tape'", "'aot_eager'", "'eager'"],
    ),
    "tape with the default compiler": ({"graphs": "tape"}, ValueError, ["graphs='tape'", "'aot_eager'", "'eager'"]),
    "unknown compiler": ({"compiler": "gcc"}, ValueError, ["'gcc'", "'inductor'", "'aot_eager'", "'eager'"]),
    "unknown graphs": ({"graphs": "vulkan"}, ValueError, ["'vulkan'", "'auto'", "'cuda'", "'tape'", "'none'"]),
    "unknown attention": (
        {**TAPE, "attention": "flash9"},
        ValueError,
        ["'flash9'", "'auto'", "'reference'", "'varlen'"],
    ),
    "attention that cannot run here": ({**TAPE, "attention": "varlen"}, ValueError, ["'varlen'", "cpu", "CUDA"]),
    "GPU graphs on a CPU": (
        {"graphs": "cuda", "compiler": "eager"},
        ValueError,
        ["graphs='cuda'", "cpu", "'tape'", "'none'", "'auto'"],
    ),
}
NEED_THE_MODEL = ("unknown attention", "attention that cannot run here", "GPU graphs on a CPU")


# Those that are found later than the others, each alone; the others one after the other on one module.
BY_MODULE = {case: [case] for case in NEED_THE_MODEL} | {"others": [c for c in BAD_OPTIONS if c not in NEED_THE_MODEL]}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cases", BY_MODULE.values(), ids=BY_MODULE)
def test_a_bad_option_is_an_error_at_the_first_call_at_the_latest(cases: list[str], way: str) -> None:
    module = MODELS["Llama" if way == "compile" and cases[0] in NEED_THE_MODEL else "T2"]()
    eager = copy.deepcopy(module)
    for case in cases:
        options, error, says = BAD_OPTIONS[case]
        with unchanged(module):
            # Dynamo wraps what a backend raises: the user of torch.compile sees our text in its exception.
            with pytest.raises(error if way == "compile" else BackendCompilerFailed) as raised:
                call(compiled(way, module, options), [9])
            fgc.close(module)  # where the error came at the first call, the module was compiled already
        for text in says:
            assert text in str(raised.value), case
        torch._dynamo.reset()
    check_good_calls(compiled(way, module, GOOD), eager)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["unknown attention", "GPU graphs on a CPU", "zero bucket"])
def test_a_bad_option_stays_an_error_at_every_call(case: str, way: str) -> None:
    options, error, says = BAD_OPTIONS[case]
    module = MODELS["T2"]()
    with pytest.raises(error if way == "compile" else BackendCompilerFailed):
        body = compiled(way, module, options)
        call(body, [9])
    if way == "torch.compile":
        for n in (9, 7, 5):
            with pytest.raises(BackendCompilerFailed, match=says[0]):
                call(body, [n])


def test_a_mode_of_torch_compile_is_an_error() -> None:
    body = torch.compile(T2().eval(), backend="full_prefill", mode="reduce-overhead")
    with pytest.raises(BackendCompilerFailed, match=r"mode='reduce-overhead'.*has no modes; use options"):
        call(body, [9])


def test_what_is_not_a_module_is_refused_by_type() -> None:
    with pytest.raises(TypeError, match=r"nn.Module, not function"):
        fgc.compile(call)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch.compile already"):
        fgc.compile(torch.compile(T2(), backend="full_prefill", options=GOOD))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"int is not a compiled module"):
        fgc.report(3)


def test_a_bad_option_leaves_a_body_that_was_compiled_before_as_it_was() -> None:
    module = MODELS["T2"]()
    eager = copy.deepcopy(module)
    fgc.compile(module, **GOOD)
    check_good_calls(module, eager)
    with unchanged(module), pytest.raises(ValueError, match="bukets"):
        fgc.compile(module, bukets=[8])
    before = sum(fgc.report(module).replays.values())
    torch.testing.assert_close(call(module, [3, 4]), per_request(eager, [3, 4]), rtol=1e-5, atol=2e-5)
    assert sum(fgc.report(module).replays.values()) == before + 1
