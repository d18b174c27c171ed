"""The tape replays exactly what eager computes, whatever the run is made of."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullgraph_compile.graphs import below
from fullgraph_compile.graphs.tape import TapeRecorder
from tests.graphs.recorded import Function, Recorded, check

WEIGHT = torch.nn.Parameter(torch.randn(4, 4))
TABLE = torch.randn(16, 4)
library = torch.library.Library("fgc_test_tape", "DEF")
library.define("scaled(Tensor x, float scale) -> Tensor")
library.define("add_one_(Tensor(a!) x) -> ()")
library.impl("scaled", lambda x, scale: (x * scale).sin(), "CPU")


def _add_one(x: Tensor) -> None:
    x.add_(1)


library.impl("add_one_", _add_one, "CompositeExplicitAutograd")


@torch.library.custom_op("fgc_test_tape::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2 + x.cos()


@torch.library.custom_op("fgc_test_tape::fill_rows", mutates_args={"out"})
def fill_rows(x: Tensor, out: Tensor) -> None:
    out.copy_(x.flip(0))


def linear(x: Tensor) -> Tensor:
    return F.silu(F.linear(x, WEIGHT)) * F.softmax(x, -1)


def in_place(x: Tensor) -> Tensor:
    h = x.clone()
    h += 1
    h.mul_(x)
    h[1:3] = 5.0
    h[:, 0].neg_()
    torch.add(h, x, out=h)
    return h


def views(x: Tensor) -> Tensor:
    h = x.view(2, 4, 4).transpose(1, 2)
    h = h.reshape(2, 16).unsqueeze(0).expand(3, 2, 16)  # the reshape copies
    a, b = h.chunk(2, dim=-1)
    h = (a + b).contiguous().to(torch.float32)  # these two do not
    h.t_() if h.dim() == 2 else h.squeeze_()
    return h.permute(2, 0, 1).flatten(1)


def empties(x: Tensor) -> Tensor:
    h = torch.empty_like(x)
    h.copy_(x)
    return h + x.new_empty(8, 4).zero_() + torch.empty(8, 4).fill_(2)


def constants(x: Tensor) -> Tensor:
    c = torch.tensor([1.0, 2.0, 3.0, 4.0])
    c.add_(x.sum())  # written after it was made: each replay begins with the frozen values
    return x * c + torch.where(x > 0, x, 0.5) + torch.full((4,), 0.25)


def indexing(x: Tensor) -> Tensor:
    ids = (x[:, 0].abs() * 10).long().clamp(max=15)
    h = F.embedding(ids, TABLE) + TABLE[ids] + TABLE[[0, 2, 1, 3, 5, 4, 6, 7]]
    return h.index_add(0, torch.arange(8), x)


def masks(x: Tensor) -> Tensor:
    h = x.clone()
    h[x > 0] = 3.0  # one value: a fill
    return h.masked_fill(x < -1, 0.0)


def custom_library(x: Tensor) -> Tensor:
    h = torch.ops.fgc_test_tape.scaled(x, 3.0)
    torch.ops.fgc_test_tape.add_one_(h)
    return h


def custom_op(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    fill_rows(doubled(x), out)
    return out


def attention(x: Tensor) -> Tensor:
    q = x.view(1, 8, 1, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)[0, 0]


RUNS = [linear, in_place, views, empties, constants, indexing, masks, custom_library, custom_op, attention]


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("function", RUNS)
def test_replays_are_exact_over_new_inputs(function: Function, inference: bool) -> None:
    with torch.inference_mode(inference):
        recorded = Recorded(function)
    assert not recorded.tape.opaque_ops
    with torch.inference_mode(inference):
        check(recorded)


def test_what_was_recorded_in_inference_mode_replays_outside_of_it() -> None:
    with torch.inference_mode():
        recorded = Recorded(linear)
        x = torch.randn(8, 4)
        expected = recorded.eager(x)
        recorded.stage(x)
    recorded.tape.replay()
    assert torch.equal(recorded.out, expected)


def test_weights_are_read_in_place_at_each_replay() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    recorded = Recorded(lambda x: F.linear(x, weight))
    with torch.no_grad():
        weight.mul_(2)
    check(recorded)


def test_custom_ops_are_recorded_below_so_their_ops_are_nodes() -> None:
    assert Recorded(lambda x: doubled(x)).tape.nodes == 4  # mul, cos, add, and the copy into the static output


def test_views_are_no_nodes() -> None:
    def function(x: Tensor) -> Tensor:
        h = x.view(2, 16).t().unsqueeze(0).expand(3, 16, 2)[0]
        h.t_()
        return h.reshape(8, 4)

    assert Recorded(function).tape.nodes == 1  # the copy into the static output


def test_random_ops_draw_from_the_live_generator() -> None:
    generator = torch.Generator().manual_seed(1)
    recorded = Recorded(lambda x: x + torch.rand(8, 4) + torch.rand(8, 4, generator=generator))
    x = torch.randn(8, 4)
    outputs = []
    for call in (recorded, recorded.eager):
        torch.manual_seed(3)
        generator.manual_seed(4)
        outputs.append([call(x), call(x)])
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert not torch.equal(outputs[0][0], outputs[0][1])


def test_recording_changes_neither_memory_nor_generators() -> None:
    recorder = TapeRecorder()
    counter, out = torch.zeros(2), torch.full((2,), 7.0)

    def run() -> None:
        counter.add_(1)
        out.copy_(counter + torch.rand(2) * 0)

    state = torch.get_rng_state()
    tape = recorder.record(run)
    assert torch.equal(torch.get_rng_state(), state)
    assert counter.tolist() == [0, 0]
    assert out.tolist() == [7, 7]
    tape.replay()
    tape.replay()
    assert counter.tolist() == [2, 2]
    assert out.tolist() == [2, 2]


def test_values_from_numpy_are_frozen_and_numpys_memory_is_left_alone() -> None:
    array = np.ones(4, dtype=np.float32)
    x, out = torch.randn(8, 4), torch.empty(8, 4)
    tape = TapeRecorder().record(lambda: out.copy_(x + torch.from_numpy(array).mul_(2)))
    assert array.tolist() == [1.0] * 4
    array[:] = 5
    for _ in range(2):
        tape.replay()
        assert torch.equal(out, x + 2)
    assert array.tolist() == [5.0] * 4


def test_a_custom_op_in_cpp_is_recorded_as_one_call_and_counted() -> None:
    weight = torch.ones(4, 4)
    try:
        packed = torch.ops._quantized.wrapped_fbgemm_pack_gemm_matrix_fp16(weight)
    except (AttributeError, RuntimeError):
        pytest.skip("this build has no FBGEMM: no op outside of aten in C++ to call")
    bias = torch.zeros(4)
    recorded = Recorded(lambda x: torch.ops._quantized.wrapped_fbgemm_linear_fp16_weight(x, packed, bias, 4))
    assert sum(recorded.tape.opaque_ops.values()) == 1
    check(recorded)


def test_below_is_free_when_nothing_records() -> None:
    with below():
        assert torch.ones(1).tolist() == [1.0]


def test_weak_references_die_after_close() -> None:
    recorder = TapeRecorder()
    recorded = Recorded(linear, recorder=recorder)
    tape = recorded.tape
    alive = [weakref.ref(t) for t in (recorded.x, recorded.out, tape, *tape._scratch.values())]
    assert len(alive) > 3
    tape.close()
    tape.close()  # twice is once
    with pytest.raises(RuntimeError, match="closed"):
        tape.replay()
    del recorded, tape
    gc.collect()
    assert not any(r() is not None for r in alive)
    assert not list(recorder.tapes)


def test_a_closed_tape_holds_nothing_while_it_is_still_held() -> None:
    recorded = Recorded(linear)
    tape, alive = recorded.tape, [weakref.ref(t) for t in (recorded.x, recorded.out, *recorded.tape._scratch.values())]
    tape.close()
    del recorded
    gc.collect()
    assert not any(r() is not None for r in alive)


def test_closing_the_recorder_closes_its_tapes_and_it_can_record_again() -> None:
    recorder = TapeRecorder()
    first = Recorded(linear, recorder=recorder)
    recorder.close()
    with pytest.raises(RuntimeError, match="closed"):
        first.tape.replay()
    check(Recorded(linear, recorder=recorder))


def test_b73_capture_and_reset_twenty_times_leaves_nothing() -> None:
    recorder = TapeRecorder()
    alive = []
    for _ in range(20):
        recorded = Recorded(linear, recorder=recorder)
        check(recorded, (3,))
        alive += [weakref.ref(recorded.tape), weakref.ref(recorded.x), weakref.ref(recorded.out)]
        recorded.tape.close()
        del recorded
    gc.collect()
    assert not any(r() is not None for r in alive)
    assert len(recorder.tapes) == 0
