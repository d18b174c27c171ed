"""What a compiled body is while it is used: its outputs, weights, failures, threads, reports, and what PyTorch expects
of a module.  Every test checks both that the numbers are right and that a graph was, or was not, replayed."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from fullgraph_compile.captured import CapturedGraph
from fullgraph_compile.graphs import CaptureError
from fullgraph_compile.graphs.tape import Tape, TapeRecorder
from fullgraph_compile.registry import compiled_for, unwrap
from fullgraph_compile.runner import BodyRunner
from tests.models import T2, tiny, tiny_causal_lm, tokens

OPTIONS: dict[str, Any] = {"buckets": [8, 16], "graphs": "tape", "compiler": "eager"}
WAYS = ["compile", "torch.compile"]
both_ways = pytest.mark.parametrize("way", WAYS)


def compiled(way: str, module: nn.Module, **options: Any) -> Any:
    if way == "compile":
        return fgc.compile(module, **{**OPTIONS, **options})
    return torch.compile(module, backend="full_prefill", options={**OPTIONS, **options})


def small() -> nn.Module:
    return T2(layers=1).eval()


def llama() -> nn.Module:
    return tiny("Llama", num_hidden_layers=1)


def run(body: Any, n: int, seed: int = 1, **more: Any) -> Any:
    """One call of one request of ``n`` tokens."""
    if not isinstance(getattr(body, "_orig_mod", body), T2):
        more = {"use_cache": False, **more}
    with torch.no_grad():
        return body(input_ids=tokens(n, seed)[None], position_ids=torch.arange(n)[None], **more)


def first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def equal(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=tolerance, atol=2 * tolerance * max(1.0, float(want.abs().max())))


def check(body: Any, eager: nn.Module, *sizes: int, seed: int = 1) -> None:
    for n in sizes:
        equal(first(run(body, n, seed)), first(run(eager, n, seed)))


def replays(body: Any) -> int:
    return sum(fgc.report(body).replays.values())


def check_replayed(body: Any, eager: nn.Module, *sizes: int, seed: int = 1) -> None:
    """Right, and each by a graph."""
    before = replays(body)
    check(body, eager, *sizes, seed=seed)
    assert replays(body) == before + len(sizes)


def runners(body: Any) -> list[BodyRunner]:
    return [c.runner for c in compiled_for(unwrap(body)) if isinstance(c, CapturedGraph)]


def ready(way: str, module: nn.Module, **options: Any) -> Any:
    """A body with all buckets captured."""
    body = compiled(way, module, **options)
    # Outside of fgc.compile the first call is traced for its size alone, and the second makes it symbolic.
    run(body, 5), run(body, 6)
    assert fgc.report(body).ready
    assert replays(body) >= 1
    return body


# -- outputs -----------------------------------------------------------------------------------------------------------


@both_ways
def test_b66_outputs_are_the_callers(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    y = first(run(body, 7))
    kept = [y, y.detach(), y[0:2], y.view(-1)]
    want = [t.clone() for t in kept]
    equal(y, run(eager, 7))
    check_replayed(body, eager, 7, 3, 12, seed=2)
    run(body, 7, 3).fill_(7.0)  # what the caller does to one output shows in no other
    for now, then in zip(kept, want, strict=True):
        assert torch.equal(now, then)
    check_replayed(body, eager, 7)


@both_ways
def test_without_cloning_an_output_is_a_view_that_the_next_call_overwrites(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module, clone_outputs=False)
    y = run(body, 7)
    equal(y, run(eager, 7))
    z = run(body, 7, 2)
    assert y.data_ptr() == z.data_ptr()
    assert torch.equal(y, z)
    equal(z, run(eager, 7, 2))
    check_replayed(body, eager, 3, 12, 8)


class Embedded(T2):
    """Takes hidden states, so that what it returns can be given to it."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.mark.parametrize("clone", [True, False])
@both_ways
def test_b67_outputs_are_inputs_of_the_next_call(way: str, clone: bool) -> None:
    module, other = Embedded(layers=1).eval(), Embedded(layers=1, heads=2).eval()
    f0, g0 = copy.deepcopy(module), copy.deepcopy(other)
    f, g = compiled(way, module, clone_outputs=clone), compiled(way, other, clone_outputs=clone)
    with torch.no_grad():
        for n in (5, 6):
            x = torch.randn(1, n, 32)
            f(x), g(x)
        before = replays(f), replays(g)
        for n in (7, 12):
            x = torch.randn(1, n, 32)
            equal(f(f(x)), f0(f0(x)), 1e-4)
            equal(g(f(x)), g0(f0(x)), 1e-4)
            equal(f(f(x)[:, :4]), f0(f0(x)[:, :4]), 1e-4)  # from one bucket into another, by a view
    assert replays(f) == before[0] + 10
    assert replays(g) == before[1] + 2


class Nested(T2):
    """Returns lists and dicts, None, numbers, and tensors that have nothing to do with tokens."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        x = self.embed(input_ids) + self.place(position_ids)
        aux = [x * 2]
        for layer in self.layers:
            x = layer(x)
            aux.append(x)
        return self.norm(x), aux, {"last": x + 1, "none": None, "norm": self.norm.weight * 2, "name": "nested"}


@both_ways
def test_b85_nested_outputs_come_back_as_they_were(way: str) -> None:
    module = Nested().eval()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    kept = run(body, 12)
    before = replays(body)
    for n in (7, 12, 3):
        hidden, aux, others = run(body, n)
        want = run(eager, n)
        equal(hidden, want[0])
        assert type(aux) is list
        assert len(aux) == 3
        for a, b in zip(aux, want[1], strict=True):
            equal(a, b)
        assert list(others) == ["last", "none", "norm", "name"]
        assert others["none"] is None
        assert others["name"] == "nested"
        equal(others["last"], want[2]["last"])
        equal(others["norm"], want[2]["norm"])
    assert replays(body) == before + 3
    for a, b in zip(kept[1], run(eager, 12)[1], strict=True):
        equal(a, b)


class Passing(T2):
    """Returns an input, a view of an input, and a parameter beside the hidden states."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        hidden = super().forward(input_ids, position_ids)
        return hidden, input_ids, position_ids[0], self.norm.weight, hidden


@both_ways
def test_outputs_that_are_inputs_or_weights_still_are(way: str) -> None:
    module = Passing(layers=1).eval()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    ids, positions = tokens(7)[None], torch.arange(7)[None]
    with torch.no_grad():
        hidden, same, view, weight, again = body(input_ids=ids, position_ids=positions)
    equal(hidden, run(eager, 7)[0])
    equal(again, hidden)
    assert same.data_ptr() == ids.data_ptr()
    assert view.data_ptr() == positions.data_ptr()
    assert weight.data_ptr() == module.norm.weight.data_ptr()
    run(body, 7, 2)
    assert torch.equal(same, tokens(7)[None])
    assert torch.equal(view, torch.arange(7))


@both_ways
def test_b101_one_body_in_every_inference_mode(way: str) -> None:
    module = small().requires_grad_(False)
    eager = copy.deepcopy(module)
    body = ready(way, module)
    want = run(eager, 7)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for made in (torch.no_grad, torch.inference_mode):
            with made():
                ids, positions = tokens(7)[None], torch.arange(7)[None]
            with mode():
                got = body(input_ids=ids, position_ids=positions)
                equal(got, want)
                assert not got.requires_grad
            if mode is not torch.inference_mode:
                # Usable by autograd afterwards.
                scale = torch.ones(32, requires_grad=True)
                (got * scale).sum().backward()
                equal(scale.grad, want.sum((0, 1)), 1e-4)


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_call_in_a_thread", [False, True])
@both_ways
def test_b109_threads_never_mix_rows(way: str, first_call_in_a_thread: bool) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = compiled(way, module) if first_call_in_a_thread else ready(way, module)
    want = {n: run(eager, n, seed=n) for n in range(1, 17)}
    failures: list[Any] = []
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        start.wait()
        for i in range(10):
            n = 2 + (5 * thread + 3 * i) % 15
            try:
                equal(run(body, n, seed=n), want[n])
            except BaseException as error:
                failures.append((thread, n, error))

    threads = [threading.Thread(target=work, args=(t,)) for t in range(8)]
    before = replays(body)
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]
    assert replays(body) >= before + (60 if first_call_in_a_thread else 80)


def test_a_batch_belongs_to_the_thread_that_entered_it() -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    inside, done = threading.Event(), threading.Event()
    got: list[Tensor] = []

    def other() -> None:
        inside.wait(30)
        got.append(run(body, 7))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with fgc.PrefillBatch([2, 3], device="cpu"):
        inside.set()
        assert done.wait(30)
    thread.join()
    equal(got[0], run(eager, 7))


# -- failures ----------------------------------------------------------------------------------------------------------


class Planned(RuntimeError):
    """A failure that a test planted."""


@both_ways
@pytest.mark.parametrize("error", [CaptureError("planned"), torch.OutOfMemoryError("planned")])
def test_b114_capture_fails_and_the_same_call_is_right(
    way: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = small()
    eager = copy.deepcopy(module)

    def record(self: TapeRecorder, piece_loop: Callable[[], None]) -> Tape:
        raise error

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "fullgraph_compile"):
        patch.setattr(TapeRecorder, "record", record)
        body = compiled(way, module)
        check(body, eager, 5, 7, 12, 7)
    assert gc.isenabled()
    report = fgc.report(body)
    assert not report.replays
    assert report.buckets == ()
    assert report.fallbacks[Reason.CAPTURE_FAILED] == (4 if way == "compile" else 3)
    assert "planned" in report.details[Reason.CAPTURE_FAILED]
    assert "planned" in caplog.text
    fgc.release(body)  # gives it another chance
    check_replayed(body, eager, 7, 12)


@both_ways
def test_b74_one_bucket_of_three_fails_to_capture_and_the_others_work(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = small()
    eager = copy.deepcopy(module)
    recorded: list[int] = []
    real = TapeRecorder.record

    def record(self: TapeRecorder, piece_loop: Callable[[], None]) -> Tape:
        recorded.append(1)
        if len(recorded) == 2:  # of 32, 16, 8

            def failing() -> None:
                piece_loop()
                raise Planned("in the middle of 16")

            return real(self, failing)
        return real(self, piece_loop)

    monkeypatch.setattr(TapeRecorder, "record", record)
    body = compiled(way, module, buckets=[8, 16, 32])
    check(body, eager, 5, 6)
    assert fgc.report(body).buckets == (8, 32)
    assert fgc.report(body).ready
    check_replayed(body, eager, 7, 30, 3)
    before = replays(body)
    check(body, eager, 12, 16)
    assert replays(body) == before
    report = fgc.report(body)
    assert report.fallbacks[Reason.CAPTURE_FAILED] == 2
    assert "bucket 16" in report.details[Reason.CAPTURE_FAILED]
    assert "in the middle of 16" in str(report)
    with torch.no_grad():
        assert Reason.CAPTURE_FAILED.value in fgc.explain(body, tokens(12)[None], torch.arange(12)[None])
    monkeypatch.undo()
    again = small()
    eager = copy.deepcopy(again)
    check_replayed(ready(way, again), eager, 7, 12)


@pytest.mark.parametrize("later", [False, True])
@both_ways
def test_b114_replay_fails_and_the_same_call_is_right(way: str, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    if later:
        check_replayed(body, eager, 7, 3, 7)
    (runner,) = runners(body)
    graph = runner.buckets[8].graph
    launched: list[int] = []

    def replay() -> None:
        launched.append(1)
        raise Planned("the launch")

    monkeypatch.setattr(graph, "replay", replay)
    before = replays(body)
    check(body, eager, 7, seed=5)
    check(body, eager, 4, 8, seed=6)
    assert replays(body) == before
    assert len(launched) == 1  # off from then on
    report = fgc.report(body)
    assert report.fallbacks[Reason.REPLAY_FAILED] == 3
    assert "the launch" in report.details[Reason.REPLAY_FAILED]
    assert report.buckets == (16,)
    check_replayed(body, eager, 12, 9)


@pytest.mark.parametrize("error", [ValueError, KeyError])
@pytest.mark.parametrize("where", ["capture", "replay"])
def test_b114_any_failure_of_a_recording_is_survived(
    where: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention backends are others' code: what they raise is no reason to lose a call that can run without a graph."""
    module = small()
    eager = copy.deepcopy(module)

    def fails(*args: Any) -> Any:
        raise error("planned")

    if where == "capture":
        monkeypatch.setattr(TapeRecorder, "record", fails)
        body = compiled("compile", module)
    else:
        body = ready("compile", module)
        for bucket in runners(body)[0].buckets.values():
            monkeypatch.setattr(bucket.graph, "replay", fails)
    check(body, eager, 7, 12)
    assert gc.isenabled()
    reason = Reason.CAPTURE_FAILED if where == "capture" else Reason.REPLAY_FAILED
    assert fgc.report(body).fallbacks[reason] == 2


# -- weights -----------------------------------------------------------------------------------------------------------


def in_place(m: Any) -> None:
    with torch.no_grad():
        m.layers[0].out.weight.mul_(-2)
        m.embed.weight.add_(0.25)


def data_swap(m: Any) -> None:
    m.layers[0].out.weight.data = m.layers[0].out.weight.data * -2


def assigned_state(m: Any) -> None:
    m.load_state_dict({k: v * -1.5 for k, v in m.state_dict().items()}, assign=True)


def copied_state(m: Any) -> None:
    m.load_state_dict({k: v * -1.5 for k, v in m.state_dict().items()})


def other_parameter(m: Any) -> None:
    m.layers[0].out.weight = nn.Parameter(m.layers[0].out.weight.detach() * -2)


def other_layer(m: Any) -> None:
    layer = copy.deepcopy(m.layers[0])
    with torch.no_grad():
        layer.out.weight.mul_(-2)
    m.layers[0] = layer


def other_module_inside(m: Any) -> None:
    m.layers[0].mlp = nn.Identity()


@pytest.mark.parametrize(
    "change", [in_place, data_swap, assigned_state, copied_state, other_parameter, other_layer, other_module_inside]
)
@both_ways
def test_changed_weights_are_followed_in_the_same_call(way: str, change: Callable[[Any], None]) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    check_replayed(body, eager, 7, 12)
    stale = run(eager, 7)
    change(module), change(eager)
    assert float((run(eager, 7) - stale).abs().max()) > 1e-2
    check(body, eager, 7, 7, 12)
    check_replayed(body, eager, 7, 12, 3)
    gc.collect()
    torch.full((64, 64), float("nan"))
    check_replayed(body, eager, 7, 12, seed=3)


@both_ways
def test_a_moved_weight_is_counted(way: str) -> None:
    body = ready(way, small())
    data_swap(unwrap(body))
    run(body, 7)
    assert fgc.report(body).fallbacks[Reason.WEIGHTS_MOVED] == 1


@both_ways
def test_a_module_that_changes_its_dtype_is_followed(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    module.double(), eager.double()
    for n in (7, 7, 12):
        got, want = run(body, n), run(eager, n)
        assert got.dtype == torch.float64
        equal(got, want, 1e-6)


@both_ways
def test_b97_a_tied_head_follows_its_embedding(way: str) -> None:
    model = tiny_causal_lm("Llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    eager = copy.deepcopy(model)
    body = ready(way, model)
    for m in (model, eager):
        with torch.no_grad():
            m.lm_head.weight.mul_(0.5)
    check_replayed(body, eager, 7, 12)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["forward hook", "forward pre-hook"])
def test_b86_hooks_added_and_removed_after_the_first_call_take_effect(kind: str) -> None:
    """By ``fgc.compile``; under ``torch.compile`` it is Dynamo that does not look at hooks of submodules again."""
    module = small()
    eager = copy.deepcopy(module)
    body = ready("compile", module)

    def hook(_: Any, args: Any, output: Any = None) -> Any:
        return args[0] + 1 if output is None else output + 1

    handles = []
    for m in (module, eager):
        layer: Any = m.layers[0]
        register = layer.register_forward_hook if kind == "forward hook" else layer.register_forward_pre_hook
        handles.append(register(hook))
    check(body, eager, 7, 12)
    for handle in handles:
        handle.remove()
    check(body, eager, 7, 12)


# -- what a module does besides computing ------------------------------------------------------------------------------


class Remembering(T2):
    """Keeps its last hidden states and counts its calls, on the module."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.last: Tensor | None = None

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.last = super().forward(input_ids, position_ids)
        return self.last * 2


@both_ways
def test_b106_what_a_module_stores_of_a_call_is_of_that_call(way: str) -> None:
    module = Remembering().eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    for n in (5, 6, 7, 12, 7):
        equal(run(body, n, seed=n), run(eager, n, seed=n))
        assert module.last is not None
        equal(module.last, eager.last)


class Counting(T2):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.seen.add_(1)
        return super().forward(input_ids, position_ids) * self.seen


@both_ways
def test_b78_a_buffer_that_each_call_changes_is_changed_once_a_call(way: str) -> None:
    module = Counting().eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    for n in (5, 6, 7, 12, 7):
        equal(run(body, n), run(eager, n))
        assert torch.equal(module.seen, eager.seen)


class Scaled(T2):
    def forward(self, input_ids: Tensor, position_ids: Tensor, scale: Any = 1.0) -> Tensor:
        x = (self.embed(input_ids) + self.place(position_ids)) * scale
        for layer in self.layers:
            x = layer(x)
        return x


@both_ways
def test_b80_a_number_on_the_cpu_is_read_at_each_call(way: str) -> None:
    module = Scaled(layers=1).eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    for n, scale in ((5, 0.5), (6, 0.7), (7, 0.5), (7, 3.0), (12, 0.1), (7, 0.1)):
        value = torch.tensor(scale)
        equal(run(body, n, scale=value), run(eager, n, scale=value))
    value.fill_(9.0)
    equal(run(body, 7, scale=value), run(eager, 7, scale=value))
    assert replays(body) >= 6


@both_ways
def test_b81_a_python_number_is_never_stale(way: str) -> None:
    module = Scaled(layers=1).eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    for n, scale in ((5, 2), (6, 3), (7, 2), (7, 4), (12, 5), (7, 3), (7, 2.5), (9, 0.5), (7, True)):
        equal(run(body, n, scale=scale), run(eager, n, scale=scale))


class Stepped(T2):
    def forward(self, input_ids: Tensor, position_ids: Tensor, step: int = 0) -> Tensor:
        return super().forward(input_ids, position_ids)


@both_ways
def test_b81_a_number_that_is_not_used_compiles_nothing_anew(way: str) -> None:
    module = Stepped(layers=1).eval()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    run(body, 5, step=0), run(body, 6, step=1)
    before = fgc.report(body).compiles
    for step in range(2, 8):
        equal(run(body, 7, step=step), run(eager, 7))
    assert fgc.report(body).compiles == before
    assert replays(body) >= 6


# -- ways to call ------------------------------------------------------------------------------------------------------


@both_ways
def test_arguments_by_position(way: str) -> None:
    module, plain = llama(), small()
    eager, plain_eager = copy.deepcopy(module), copy.deepcopy(plain)
    body, plain_body = ready(way, module), ready(way, plain)
    before = replays(body), replays(plain_body)
    for n in (7, 6, 5):  # for Dynamo it is another form of the call, which begins with a graph of one size
        ids, positions = tokens(n)[None], torch.arange(n)[None]
        with torch.no_grad():
            equal(body(ids, None, positions, use_cache=False)[0], eager(ids, None, positions, use_cache=False)[0])
            equal(plain_body(ids, positions), plain_eager(ids, positions))
    assert replays(body) >= before[0] + 2
    assert replays(plain_body) >= before[1] + 2


RESTARTING = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by position"])
@pytest.mark.parametrize("model", ["T2", "Llama"])
@both_ways
def test_restarting_positions_mean_what_the_module_takes_them_for(way: str, model: str, by_name: bool) -> None:
    """transformers tells packed requests by them; a module of one's own knows one request."""
    ids = tokens(7)[None]
    module = llama() if model == "Llama" else small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    args = (ids,) if by_name else (ids, None, RESTARTING) if model == "Llama" else (ids, RESTARTING)
    named: dict[str, Any] = {"position_ids": RESTARTING} if by_name else {}
    if model == "Llama":
        named["use_cache"] = False
    with torch.no_grad():
        equal(first(body(*args, **named)), first(eager(*args, **named)))


@both_ways
def test_embeddings_in_place_of_ids(way: str) -> None:
    module = llama()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    for n in (5, 6, 7, 12):
        x, positions = torch.randn(1, n, 32), torch.arange(n)[None]
        with torch.no_grad():
            got = body(inputs_embeds=x, position_ids=positions, use_cache=False)[0]
            equal(got, eager(inputs_embeds=x, position_ids=positions, use_cache=False)[0])
        check(body, eager, n)
    assert replays(body) >= 7
    with torch.no_grad(), pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        eager(input_ids=tokens(5)[None], inputs_embeds=torch.randn(1, 5, 32), use_cache=False)
    with torch.no_grad(), pytest.raises(Exception, match="exactly one of input_ids or inputs_embeds"):
        body(input_ids=tokens(5)[None], inputs_embeds=torch.randn(1, 5, 32), use_cache=False)


@both_ways
def test_b79_inputs_of_any_layout(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    wide = torch.stack([tokens(14), tokens(14, 2)])
    shared = torch.arange(1, 15)
    pairs = [
        (wide[1:, ::2], torch.arange(7).expand(1, 7)),
        (tokens(7)[None].int(), torch.arange(7)[None].int()),
        (shared[None, 3:10], shared[None, :7]),
        (tokens(7)[:, None].t(), torch.arange(28).view(4, 7)[1:2]),
    ]
    with torch.no_grad():
        for ids, positions in pairs:
            equal(body(input_ids=ids, position_ids=positions), eager(input_ids=ids, position_ids=positions))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@both_ways
def test_half_precision(way: str, dtype: torch.dtype) -> None:
    module = llama().to(dtype)
    eager = copy.deepcopy(module)
    body = ready(way, module)
    before = replays(body)
    for n in (7, 12, 3):
        equal(run(body, n)[0], run(eager, n)[0], 2e-2)
    assert replays(body) == before + 3


@both_ways
def test_autocast_is_followed_both_ways(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    for _ in range(2):
        for n in (7, 12):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got, want = run(body, n), run(eager, n)
            assert float((want - run(eager, n)).abs().max()) > 1e-4
            equal(got, want, 2e-2)
            check(body, eager, n)


@both_ways
def test_b116_training_and_gradients_run_eagerly_and_eval_replays_again(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    before = replays(body)
    for m, f in ((module, body), (eager, eager)):
        out = f(input_ids=tokens(7)[None], position_ids=torch.arange(7)[None])
        assert out.requires_grad
        out.square().sum().backward()
        assert m.layers[0].out.weight.grad is not None
    for (name, got), want in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert got.grad is not None, name
        equal(got.grad, want.grad, 1e-4)
    assert replays(body) == before
    assert fgc.report(body).fallbacks[Reason.GRAD] == 1
    module.train()
    run(body, 7)
    module.eval()
    check_replayed(body, eager, 7, 12)


def test_b116_dropout_is_live_in_training_mode_only() -> None:
    module = T2(layers=1, mlp=nn.Dropout(0.5))
    eager = copy.deepcopy(module).eval()
    body = compiled("compile", module)
    state = torch.get_rng_state()
    assert not torch.equal(run(body, 7), run(body, 7))
    assert not replays(body)
    assert fgc.report(body).fallbacks == {Reason.TRAINING: 2}
    module.eval()
    torch.set_rng_state(state)
    check_replayed(body, eager, 7, 12)
    assert torch.equal(torch.get_rng_state(), state)


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["model", "body"])
def test_generate_of_a_compiled_model_is_right(part: str) -> None:
    model = tiny_causal_lm("Llama")
    eager = copy.deepcopy(model)
    fgc.compile(model if part == "model" else model.model, **OPTIONS)
    ids = torch.stack([tokens(6), tokens(6, 2)])
    for prompt in (ids[:1], ids):
        settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert torch.equal(model.generate(prompt, **settings), eager.generate(prompt, **settings))
    assert not replays(model)
    assert fgc.report(model).fallbacks
    # And it still replays what it can.
    with torch.no_grad():
        out = model.model(input_ids=ids[:1], use_cache=False) if part == "body" else run(model, 6)
        want = eager.model(input_ids=ids[:1], use_cache=False) if part == "body" else run(eager, 6)
    equal(out[0], want[0])
    assert replays(model) == 1


def test_generate_of_a_model_compiled_by_torch_in_place_is_right() -> None:
    model = tiny_causal_lm("Llama")
    eager = copy.deepcopy(model)
    model.compile(backend="full_prefill", options=OPTIONS)
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(tokens(6)[None], **settings), eager.generate(tokens(6)[None], **settings))


# -- strict, unsafe, off -----------------------------------------------------------------------------------------------


@both_ways
def test_strict_raises_where_no_graph_would_be_replayed(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = compiled(way, module, strict=True)
    if way == "torch.compile":
        with pytest.raises(fgc.FallbackError, match="one fixed token count"):
            run(body, 5)
        run(body, 6)
    check_replayed(body, eager, 7, 12)
    with pytest.raises(fgc.FallbackError, match=r"more tokens than the largest bucket \(40 tokens, largest bucket 16"):
        run(body, 40)
    assert fgc.report(body).fallbacks[Reason.OVER_LADDER] == 1
    check_replayed(body, eager, 7, 12)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-2, keepdim=True)  # over the tokens


def mixing() -> nn.Module:
    # Two layers: after the last attention call it would belong to the tail, which runs on real rows.
    return T2(layers=2, mlp=Mixing()).eval()


@both_ways
def test_an_unproven_body_runs_compiled_and_the_report_names_the_line(way: str) -> None:
    module = mixing()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    check(body, eager, 5, 7, 12)
    report = fgc.report(body)
    assert not report.replays
    assert report.fallbacks[Reason.UNPROVEN] >= 2
    line = Mixing.forward.__code__.co_firstlineno + 1
    for text in (report.proof, report.details[Reason.UNPROVEN]):
        assert "mean" in text
        assert f"test_runtime.py:{line}" in text
    assert "mean" in str(report)


@both_ways
def test_unsafe_error_raises_with_node_and_line(way: str) -> None:
    body = compiled(way, mixing(), unsafe="error")
    line = Mixing.forward.__code__.co_firstlineno + 1
    if way == "torch.compile":
        run(body, 5)  # one size: nothing is padded, so nothing is unsafe
    for n in (6, 7):
        with pytest.raises(fgc.FallbackError, match=rf"mean.*test_runtime.py:{line}.*unsafe='error'"):
            run(body, n)


@both_ways
def test_the_switch_turns_all_of_it_into_a_plain_call(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLGRAPH_COMPILE_DISABLE", "1")
    module = small()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    check(body, eager, 5, 6, 7, 12)
    assert "forward" not in module.__dict__
    assert fgc.report(body).compiles == 0
    assert "FULLGRAPH_COMPILE_DISABLE" in fgc.explain(body, input_ids=tokens(7)[None])


def test_the_switch_is_read_at_each_call_of_fgc_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    before = replays(body)
    monkeypatch.setenv("FULLGRAPH_COMPILE_DISABLE", "1")
    check(body, eager, 7, 12)
    assert replays(body) == before
    assert "FULLGRAPH_COMPILE_DISABLE" in fgc.explain(body, input_ids=tokens(7)[None])
    monkeypatch.setenv("FULLGRAPH_COMPILE_DISABLE", "0")
    check_replayed(body, eager, 7, 12)


# -- warmup, release, close, report, explain ---------------------------------------------------------------------------


@both_ways
def test_warmup_captures_and_counts_nothing(way: str) -> None:
    module = llama()
    eager = copy.deepcopy(module)
    body = compiled(way, module)
    with torch.no_grad():
        report = fgc.warmup(body)
    assert report.ready
    assert report.buckets == (8, 16)
    assert not report.replays
    assert not report.fallbacks
    compiles = report.compiles
    check_replayed(body, eager, 7, 12, 3)
    assert fgc.report(body).compiles == compiles
    assert not fgc.report(body).fallbacks


@both_ways
def test_release_frees_and_the_next_call_captures_again_without_compiling(way: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready(way, module)
    compiles = fgc.report(body).compiles
    graphs = [weakref.ref(b.graph) for r in runners(body) for b in r.buckets.values()]
    inputs = [weakref.ref(t) for r in runners(body) for b in r.buckets.values() for t in b.inputs.values()]
    fgc.release(body)
    gc.collect()
    assert [r() for r in (*graphs, *inputs)] == [None] * (len(graphs) + len(inputs))
    assert fgc.report(body).buckets == ()
    assert not fgc.report(body).ready
    fgc.release(body)  # twice is once
    check_replayed(body, eager, 7, 12)
    assert fgc.report(body).compiles == compiles
    assert fgc.report(body).ready


def test_close_gives_the_module_its_forward_back() -> None:
    module = small()
    eager = copy.deepcopy(module)
    before = dict(module.__dict__)
    body = ready("compile", module)
    assert body is module
    fgc.close(body)
    assert module.__dict__ == before
    check(module, eager, 7, 12)
    assert fgc.report(body).buckets == ()
    fgc.close(body)
    check_replayed(ready("compile", module), eager, 7, 12)


def test_close_keeps_a_forward_that_the_user_had_set() -> None:
    module = small()
    original = module.forward
    module.forward = lambda input_ids, position_ids: original(input_ids, position_ids) * 3
    mine = module.forward
    want = run(module, 7)
    body = ready("compile", module)
    equal(run(body, 7), want)
    fgc.close(body)
    assert module.forward is mine
    equal(run(module, 7), want)


def test_close_of_a_torch_compiled_body_frees_and_leaves_it_right() -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("torch.compile", module)
    fgc.close(body)
    assert fgc.report(body).buckets == ()
    check(body, eager, 7, 12)


@both_ways
def test_b73_nothing_keeps_a_dropped_body_alive(way: str) -> None:
    module = small()
    body = ready(way, module)
    dead = [weakref.ref(module), weakref.ref(runners(body)[0]), weakref.ref(module.embed.weight)]
    del module, body
    torch._dynamo.reset()
    gc.collect()
    assert [r() for r in dead] == [None, None, None]


@both_ways
def test_the_report_tells_a_person_what_happened(way: str) -> None:
    body = ready(way, tiny("Llama"), request_slots=2)
    fgc_report = fgc.report(body)
    run(body, 40), run(body, 40), run(body, 12)
    with fgc.PrefillBatch([2, 2, 3], device="cpu") as batch, torch.no_grad():
        body(input_ids=tokens(7)[None], position_ids=batch.position_ids[None], use_cache=False)
    report = fgc.report(body)
    assert report.fallbacks[Reason.OVER_LADDER] == 2
    assert report.fallbacks[Reason.OVER_SLOTS] == 1
    text = str(report)
    for part in ("8", "16", "40 tokens, largest bucket 16", "3 requests, 2 slots", "4/2 heads of 8", "2 request slots"):
        assert part in text
    for reason in (Reason.OVER_LADDER, Reason.OVER_SLOTS):
        assert reason.value in " ".join(text.split())
    assert report.padding[16] == 4
    # What was handed out before does not change.
    assert Reason.OVER_LADDER not in fgc_report.fallbacks
    assert [s.module.split(".")[-1] for s in report.sites] == ["self_attn", "self_attn"]


@both_ways
def test_the_sites_have_the_path_of_their_module(way: str) -> None:
    body = ready(way, tiny("Llama"))
    assert [s.module for s in fgc.report(body).sites] == ["layers.0.self_attn", "layers.1.self_attn"]


@both_ways
def test_explain_says_what_the_call_will_do_and_does_nothing(way: str) -> None:
    body = ready(way, small())
    before = str(fgc.report(body))
    with torch.no_grad():
        assert "bucket 8" in fgc.explain(body, input_ids=tokens(7)[None], position_ids=torch.arange(7)[None])
        assert "bucket 16" in fgc.explain(body, tokens(9)[None], torch.arange(9)[None])
        over = fgc.explain(body, input_ids=tokens(40)[None], position_ids=torch.arange(40)[None])
        assert "more tokens than the largest bucket" in over
        with fgc.PrefillBatch([1] * 12, device="cpu") as batch:
            many = fgc.explain(body, input_ids=tokens(12)[None], position_ids=batch.position_ids[None])
        assert "bucket 16" in many
    assert str(fgc.report(body)) == before


@both_ways
def test_explain_of_a_call_with_gradients(way: str) -> None:
    body = ready(way, small())
    assert "gradients are enabled" in fgc.explain(body, input_ids=tokens(7)[None], position_ids=torch.arange(7)[None])


def test_explain_before_anything_was_traced() -> None:
    body = compiled("compile", small())
    with torch.no_grad():
        assert "bucket 8" in fgc.explain(body, input_ids=tokens(7)[None], position_ids=torch.arange(7)[None])
    assert fgc.report(body).compiles == 0


@both_ways
def test_b63_each_reason_is_logged_once_and_counted_each_time(way: str, caplog: pytest.LogCaptureFixture) -> None:
    body = ready(way, small(), request_slots=2)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fullgraph_compile"):
        for n in (40, 41, 17, 40):
            run(body, n)
        for _ in range(3):
            with fgc.PrefillBatch([2, 2, 3], device="cpu") as batch, torch.no_grad():
                body(input_ids=tokens(7)[None], position_ids=batch.position_ids[None])
    said = [r.getMessage() for r in caplog.records if r.name == "fullgraph_compile"]
    assert len(said) == 2
    assert Reason.OVER_LADDER.value in said[0]
    assert "40 tokens" in said[0]
    assert Reason.OVER_SLOTS.value in said[1]
    report = fgc.report(body)
    assert report.fallbacks[Reason.OVER_LADDER] == 4
    assert report.fallbacks[Reason.OVER_SLOTS] == 3


def test_the_report_of_one_body_is_its_own_and_the_report_of_all_has_both() -> None:
    one, two = ready("compile", small()), ready("torch.compile", Scaled(layers=1).eval())
    run(one, 7), run(one, 7), run(two, 12)
    assert fgc.report(one).replays == {8: 4}
    assert fgc.report(two).replays[16] == 1
    everything = fgc.report()
    assert everything.replays[8] >= 5
    assert everything.replays[16] >= 1


# -- the module is still the module ------------------------------------------------------------------------------------


def test_b93_the_module_is_what_it_was() -> None:
    model = tiny_causal_lm("Llama")
    keys, kind, names = list(model.state_dict()), type(model), [n for n, _ in model.named_modules()]
    body = ready("compile", model)
    assert body is model
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_modules()] == names
    assert model.config._attn_implementation == "sdpa"
    assert model.dtype == torch.float32
    model.something = 3
    assert body.something == 3
    import inspect

    assert "input_ids" in inspect.signature(model.forward).parameters


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_a_compiled_module_is_right_and_of_its_own(how: str) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    before = replays(body)
    if how == "deepcopy":
        other = copy.deepcopy(module)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert type(other) is type(module)
    check(other, eager, 7, 12)
    with torch.no_grad():
        other.embed.weight.mul_(-1)
        eager.embed.weight.mul_(-1)
    check(other, eager, 7, 12)
    eager.embed.weight.data.mul_(-1)
    assert replays(body) == before
    check_replayed(body, eager, 7, 12)


def test_save_and_load_of_a_compiled_model(tmp_path: Path) -> None:
    model = tiny_causal_lm("Llama")
    eager = copy.deepcopy(model)
    ready("compile", model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "sdpa"
    for a, b in zip(loaded.state_dict().values(), eager.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    equal(run(loaded, 7)[0], run(eager, 7)[0])
    loaded.load_state_dict(model.state_dict())


def test_compiling_a_compiled_module_again_takes_the_new_options() -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    assert fgc.compile(body, **{**OPTIONS, "buckets": [4, 32]}) is module
    check_replayed(body, eager, 3, 30)
    assert fgc.report(body).buckets == (4, 32)
    fgc.close(body)
    assert "forward" not in module.__dict__


def test_b99_the_same_options_compile_nothing_anew() -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("torch.compile", module)
    compiles = fgc.report(body).compiles
    again = compiled("torch.compile", module)
    check_replayed(again, eager, 7, 12)
    assert fgc.report(body).compiles == compiles
    other = compiled("torch.compile", module, buckets=[32])
    run(other, 5), run(other, 6)
    check(other, eager, 7)
    assert fgc.report(other).replays[32] >= 1


class Pair(nn.Module):
    """Two bodies on one model, the second on what the first returns, with one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = T2(layers=1), T2(layers=1)
        self.two.embed = self.one.embed

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.one(input_ids, position_ids) + 2 * self.two(input_ids, position_ids)


@both_ways
def test_two_bodies_on_one_model(way: str) -> None:
    pair = Pair().eval()
    eager = copy.deepcopy(pair)
    if way == "compile":
        for part in (pair.one, pair.two):
            fgc.compile(part, **OPTIONS)
    else:
        pair.one, pair.two = (compiled(way, part) for part in (pair.one, pair.two))
    with torch.no_grad():
        for n in (5, 6, 7, 12, 3):
            args = tokens(n, seed=n)[None], torch.arange(n)[None]
            equal(pair(*args), eager(*args))
    # Of ten calls: one for each body as traced, and one that finds the other body's weights and captures for them.
    assert sum(fgc.report(pair).replays.values()) >= 7


def test_a_compiled_body_inside_of_a_compiled_model() -> None:
    model = tiny_causal_lm("Llama")
    eager = copy.deepcopy(model)
    fgc.compile(model.model, **OPTIONS)
    run(model.model, 5)
    fgc.compile(model, **OPTIONS)
    for n in (7, 12, 3):
        equal(run(model, n).logits, run(eager, n).logits)
        equal(run(model.model, n)[0], run(eager.model, n)[0])
