"""Every error has the wrong value and what is valid, changes nothing, and leaves the next good call right."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import fullgraph_compile as fgc
from fullgraph_compile.batch import active_batch
from tests.models import T2, tiny, tokens

GOOD: dict[str, Any] = {"buckets": [16], "graphs": "tape", "compiler": "eager"}
WAYS = ["compile", "torch.compile"]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "T2": lambda: T2(layers=1).eval(),
    "Llama": lambda: tiny("Llama", num_hidden_layers=1),
}


def compiled(way: str, module: nn.Module, options: dict[str, Any]) -> Any:
    if way == "compile":
        return fgc.compile(module, **options)
    return torch.compile(module, backend="full_prefill", options=options)


def call(body: Any, lengths: list[int], batch: fgc.PrefillBatch | None = None) -> Tensor:
    """One packed call; ``lengths`` are what its ids and positions are made of, whatever the batch says."""
    described = fgc.PrefillBatch(lengths, device="cpu")
    module = getattr(body, "_orig_mod", body)
    more = {} if isinstance(module, T2) else {"use_cache": False}
    with torch.no_grad(), batch or described:
        out = body(
            input_ids=tokens(described.tokens)[None],
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
            **more,
        )
    return (out if isinstance(out, Tensor) else out[0])[0]


def per_request(model: nn.Module, lengths: list[int]) -> Tensor:
    more = {} if isinstance(model, T2) else {"use_cache": False}
    ids, rows, start = tokens(sum(lengths)), [], 0
    for n in lengths:
        with torch.no_grad():
            out = model(input_ids=ids[None, start : start + n], position_ids=torch.arange(n)[None], **more)
        rows.append((out if isinstance(out, Tensor) else out[0])[0])
        start += n
    return torch.cat(rows)


def check_good_calls(body: Any, eager: nn.Module) -> None:
    """Calls of one request and of several are right and replay."""
    before = sum(fgc.report(body).replays.values())
    # Outside of fgc.compile the first call is traced for its size alone, so it is not a batch of several.
    for lengths in ([9], [7], [3, 4, 2]):
        torch.testing.assert_close(call(body, lengths), per_request(eager, lengths), rtol=1e-5, atol=2e-5)
    assert sum(fgc.report(body).replays.values()) >= before + 2


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """The module has the same attributes, weights and attention setting after as before."""
    attributes = dict(module.__dict__)
    weights = {k: (v.data_ptr(), v.clone()) for k, v in module.state_dict().items()}
    setting = getattr(getattr(module, "config", None), "_attn_implementation", None)
    yield
    changed = {k for k, v in module.__dict__.items() if attributes.get(k) is not v}
    assert changed <= {"_is_torch_compile"}  # torch.compile's own mark
    assert list(module.state_dict()) == list(weights)
    for name, value in module.state_dict().items():
        pointer, before = weights[name]
        assert value.data_ptr() == pointer
        assert torch.equal(value, before)
    assert getattr(getattr(module, "config", None), "_attn_implementation", None) == setting
    assert active_batch() is None


# -- options: an error before anything is compiled ---------------------------------------------------------------------

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


# -- batches: an error before a buffer is touched ----------------------------------------------------------------------


def counts(body: Any) -> tuple[Counter[int], Counter[fgc.Reason], int]:
    report = fgc.report(body)
    return report.replays, report.fallbacks, report.compiles


def memory(body: Any) -> list[Tensor]:
    """Copies of all static buffers of all graphs of a body."""
    from fullgraph_compile.captured import CapturedGraph
    from fullgraph_compile.registry import compiled_for, unwrap

    copies: list[Tensor] = []
    for graph in compiled_for(unwrap(body)):
        if isinstance(graph, CapturedGraph):
            for bucket in graph.runner.buckets.values():
                copies += [t.clone() for t in (bucket.static.cu_q, *bucket.inputs.values(), *bucket.outputs)]
    return copies


def fails_and_changes_nothing(body: Any, lengths: list[int], batch: fgc.PrefillBatch, says: list[str]) -> None:
    module = getattr(body, "_orig_mod", body)
    before, held = counts(body), memory(body)
    with unchanged(module), pytest.raises(ValueError) as raised:
        call(body, lengths, batch)
    for text in says:
        assert text in str(raised.value)
    assert counts(body)[:2] == before[:2]
    now = memory(body)
    assert len(now) == len(held)
    assert all(torch.equal(a, b) for a, b in zip(now, held, strict=True))


WRONG_BATCHES: dict[str, tuple[Callable[[], fgc.PrefillBatch], list[str]]] = {
    "sum too small": (lambda: fgc.PrefillBatch([3, 4], device="cpu"), ["add up to 7", "9 tokens", "equal"]),
    "sum too large": (lambda: fgc.PrefillBatch([9, 9], device="cpu"), ["add up to 18", "9 tokens", "equal"]),
    "another device": (
        lambda: fgc.PrefillBatch([9], device="meta"),
        ["on meta", "on cpu", "device='cpu'"],
    ),
    "a GPU that is not there": (
        lambda: fgc.PrefillBatch([4, 5], device="cuda:3"),
        ["on cuda:3", "on cpu", "device='cpu'"],
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_does_not_describe_the_call_is_an_error(way: str, model: str) -> None:
    module = MODELS[model]()
    eager = copy.deepcopy(module)
    body = compiled(way, module, GOOD)
    # At the first call, which traces; then when everything is captured.
    for make, says in WRONG_BATCHES.values():
        fails_and_changes_nothing(body, [9], make(), says)
    check_good_calls(body, eager)
    for make, says in WRONG_BATCHES.values():
        fails_and_changes_nothing(body, [9], make(), says)
        torch.testing.assert_close(call(body, [4, 2]), per_request(eager, [4, 2]), rtol=1e-5, atol=2e-5)


def test_a_wrong_batch_is_an_error_outside_of_every_graph_too() -> None:
    """Over the ladder no graph is used, but the batch is read all the same."""
    for way in WAYS:
        body = compiled(way, MODELS["T2"](), GOOD)
        call(body, [9]), call(body, [7])
        with pytest.raises(ValueError, match=r"add up to 39, but the call has 40 tokens"):
            call(body, [40], fgc.PrefillBatch([20, 19], device="cpu"))


@pytest.mark.parametrize("way", WAYS)
def test_positions_of_another_length_are_an_error(way: str) -> None:
    module = tiny("Llama", num_hidden_layers=1)
    eager = copy.deepcopy(module)
    body = compiled(way, module, GOOD)
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # pytest would format every frame
    if way == "compile":
        for inside in (None, fgc.PrefillBatch([9], device="cpu")):
            with torch.no_grad(), pytest.raises(ValueError, match=r"position_ids has .*8.* 9 tokens"):
                if inside is None:
                    body(input_ids=tokens(9)[None], position_ids=torch.arange(8)[None], use_cache=False)
                else:
                    with inside:
                        body(input_ids=tokens(9)[None], position_ids=torch.arange(8)[None], use_cache=False)
    else:
        with torch.no_grad(), pytest.raises(Exception, match=r"(?s)9.*8|8.*9"):
            body(input_ids=tokens(9)[None], position_ids=torch.arange(8)[None], use_cache=False)
    check_good_calls(body, eager)


@pytest.mark.parametrize("way", WAYS)
def test_a_second_batch_entered_inside_one_is_an_error(way: str) -> None:
    module = MODELS["T2"]()
    eager = copy.deepcopy(module)
    body = compiled(way, module, GOOD)
    check_good_calls(body, eager)
    before = counts(body)
    outer, inner = fgc.PrefillBatch([4, 5], device="cpu"), fgc.PrefillBatch([9], device="cpu")
    with torch.no_grad(), outer:
        for second in (inner, outer):
            with pytest.raises(RuntimeError) as raised, second:
                pass
            assert str(raised.value).count("PrefillBatch(") == 2
            assert "4, 5" in str(raised.value)
            assert "leave the first" in str(raised.value)
        assert counts(body) == before
        # The first is still the active one.
        got = body(input_ids=tokens(9)[None], position_ids=outer.position_ids[None])[0]
    torch.testing.assert_close(got, per_request(eager, [4, 5]), rtol=1e-5, atol=2e-5)
    assert active_batch() is None
    check_good_calls(body, eager)


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_left_after_an_error_inside_it(way: str) -> None:
    module = MODELS["T2"]()
    eager = copy.deepcopy(module)
    body = compiled(way, module, GOOD)
    check_good_calls(body, eager)
    batch = fgc.PrefillBatch([4, 5], device="cpu")
    with pytest.raises(ValueError, match="add up to 9, but the call has 8"):
        call(body, [8], batch)
    torch.testing.assert_close(call(body, [4, 5], batch), per_request(eager, [4, 5]), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"new_tokens": []}, ValueError, "at least one"),
        ({"new_tokens": [3, -1]}, ValueError, "holds -1.*0 or more"),
        ({"new_tokens": [3, 2.5]}, TypeError, "2.5.*not an integer"),
        ({"new_tokens": [3], "cached_tokens": [4]}, ValueError, r"cached_tokens=\[4\].*or 0 for each"),
        ({"new_tokens": [3], "cached_tokens": [0, 0]}, ValueError, "2 entries.*has 1"),
    ],
)
def test_a_bad_batch_is_an_error_when_it_is_made(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fgc.PrefillBatch(**given, device="cpu")


# -- asking ------------------------------------------------------------------------------------------------------------


def test_warmup_without_arguments_says_what_it_needs() -> None:
    body = fgc.compile(MODELS["T2"](), **GOOD)
    with pytest.raises(TypeError, match=r"T2 is called.*warmup\(body, input_ids"):
        fgc.warmup(body)
    assert fgc.warmup(body, input_ids=tokens(5)[None], position_ids=torch.arange(5)[None]).ready


@pytest.mark.parametrize("way", WAYS)
def test_explain_checks_the_batch_as_the_call_does(way: str) -> None:
    body = compiled(way, MODELS["T2"](), GOOD)
    call(body, [9]), call(body, [7])
    says = "add up to 7, but the call has 9"
    with torch.no_grad(), pytest.raises(ValueError, match=says), fgc.PrefillBatch([3, 4], device="cpu"):
        fgc.explain(body, input_ids=tokens(9)[None], position_ids=torch.arange(9)[None])
