"""One body called from several threads."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import fullgraph_compile as fgc
from fullgraph_compile.batch import active_batch
from fullgraph_compile.compiled_body import compiled_body
from fullgraph_compile.tracing import Tracer
from tests.models import tiny, tokens
from tests.runtime.bodies import both_ways, compiled, equal, ready, replays, run, small


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


def test_b109_a_compile_in_another_thread_sends_no_call_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    module = small()
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    want = run(eager, 9, seed=3)
    before = replays(body)
    # As torch 2.13 has it in every thread for as long as any of them compiles.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    equal(run(body, 9, seed=3), want)
    assert replays(body) == before + 1


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


def test_threads_inside_of_one_batch_leave_it_each_for_itself() -> None:
    batch, both = fgc.PrefillBatch([3, 4], device="cpu"), threading.Barrier(2)
    left: list[Any] = []

    def work(turn: int) -> None:
        try:
            with batch:
                both.wait()
                # The one that came in first leaves first, or last.
                if turn:
                    both.wait()
            if not turn:
                both.wait()
            left.append(active_batch())
        except BaseException as error:
            left.append(error)
            both.abort()

    for order in ((0, 1), (1, 0)):
        threads = []
        for turn in order:
            threads.append(threading.Thread(target=work, args=(turn,)))
            threads[-1].start()
            time.sleep(0.02)
        for thread in threads:
            thread.join()
    assert left == [None] * 4


def test_what_was_learned_of_a_model_is_not_forgotten_under_a_call_of_another_thread() -> None:
    module = tiny("Llama", num_hidden_layers=1)
    body = ready("compile", module)
    compiled = compiled_body(body)
    assert compiled is not None
    started, done = threading.Event(), threading.Event()
    bind = compiled.binder.bind

    def slow(*args: Any, **kwargs: Any) -> Any:
        bound = bind(*args, **kwargs)
        started.set()
        # No other thread gets to forget until the call is made.
        assert not done.wait(0.2)
        return bound

    compiled.binder.bind = slow  # type: ignore[method-assign]

    def forget() -> None:
        started.wait()
        fgc.release(body)
        done.set()

    thread = threading.Thread(target=forget)
    thread.start()
    out = run(body, 5)
    thread.join()
    assert type(out) is type(run(copy.deepcopy(module), 5))


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_that_waits_while_the_body_is_closed_is_one_of_the_module(strict: bool) -> None:
    module = small()
    body = ready("compile", module, strict=strict)
    compiled = compiled_body(body)
    assert compiled is not None
    want, got, called = run(copy.deepcopy(module), 5), [], threading.Event()
    served = compiled._served

    def waiting(*args: Any, **kwargs: Any) -> Any:
        called.set()
        return served(*args, **kwargs)

    def work() -> None:
        try:
            got.append(run(body, 5))
            with fgc.PrefillBatch([2, 3], device="cpu"):
                compiled(tokens(5))
        except BaseException as error:
            got.append(error)

    compiled._served = waiting  # type: ignore[method-assign]
    thread = threading.Thread(target=work)
    with compiled._lock:
        thread.start()
        called.wait(30)
        time.sleep(0.05)  # it waits for the lock now
        fgc.close(body)
    thread.join()
    equal(got[0], want)
    # As the module itself it would let the two requests see each other.
    assert isinstance(got[1], fgc.FallbackError), got[1]
    assert "close() was called" in str(got[1])
    assert not compiled.graphs() and fgc.compile(module) is module


def test_a_call_of_the_model_itself_is_not_made_while_another_thread_has_it_switched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = tiny("Llama", num_hidden_layers=1)
    eager = copy.deepcopy(module)
    body = ready("compile", module)
    compiled = compiled_body(body)
    assert compiled is not None
    ids, mask = tokens(8).view(2, 4), torch.ones(2, 1, 4, 4).tril().bool()  # by such a mask no graph serves it
    inside, tracing, forward = threading.Event(), threading.Event(), compiled.integration.forward
    caller, trace = threading.current_thread(), Tracer.trace

    def slow(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is caller:
            inside.set()
            tracing.wait(0.3)
            time.sleep(0.1)  # it is being traced, if it may be
        return forward(*args, **kwargs)

    def traced(*args: Any, **kwargs: Any) -> Any:
        tracing.set()
        return trace(*args, **kwargs)

    def work() -> None:
        inside.wait()
        run(body, 5, output_hidden_states=True)

    monkeypatch.setattr(compiled.integration, "_own_forward", slow)
    monkeypatch.setattr(Tracer, "trace", traced)
    thread = threading.Thread(target=work)
    thread.start()
    with torch.no_grad():
        got, want = (m(input_ids=ids, attention_mask=mask, use_cache=False)[0] for m in (body, eager))
    thread.join()
    equal(got, want)
