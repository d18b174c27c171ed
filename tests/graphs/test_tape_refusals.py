"""What cannot be replayed is refused while recording, by the name of the call; the recorder stays usable."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullgraph_compile.graphs import CaptureError, below
from fullgraph_compile.graphs.tape import TapeRecorder
from tests.graphs.recorded import Recorded, check

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "__array__": lambda x: np.asarray(x),
    "__dlpack__": lambda x: np.from_dlpack(x),
    "__bool__": lambda x: bool(x.sum() > 0),
    "__int__": lambda x: int(x.sum()),
    "__float__": lambda x: float(x.sum()),
    "__index__": lambda x: [1, 2, 3][(x.sum() * 0).long()],
    "__repr__": lambda x: repr(x),
    "__format__": lambda x: f"{x.sum():.2f}",
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "index": lambda x: x[x > 0],
    "index_put_": lambda x: x.clone().index_put_((x > 0,), torch.ones(2)),
    "unique": lambda x: x.unique(),
    "equal": lambda x: x.equal(x),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones(8, dtype=torch.long), dim=0),
    "bincount": lambda x: torch.bincount(x[:, 0].abs().long()),
    "where": lambda x: torch.where(x > 0),
    "set_": lambda x: torch.empty(0).set_(x),
    "resize_": lambda x: torch.empty(0).resize_(4),
}
library = torch.library.Library("fgc_test_refusals", "DEF")
library.define("reads(Tensor x, str how) -> Tensor")


def _reads(x: Tensor, how: str) -> Tensor:
    READS[how](x)
    return x + 1


library.impl("reads", _reads, "CPU")


@torch.library.custom_op("fgc_test_refusals::reads_op", mutates_args=())
def reads_op(x: Tensor, how: str) -> Tensor:
    READS[how](x)
    return x + 1


PLACES: dict[str, Callable[[Tensor, str], Tensor]] = {
    "in the run": _reads,
    "below an op of a Library": lambda x, how: torch.ops.fgc_test_refusals.reads(x, how),
    "below a custom_op": lambda x, how: reads_op(x, how),
}


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", READS)
def test_host_reads_are_refused_by_name(how: str, place: str, inference: bool) -> None:
    recorder, x = TapeRecorder(), torch.randn(8, 4)
    names = {"__int__": "__int__|item|_local_scalar_dense", "__index__": "__index__|item|_local_scalar_dense"}
    names |= {"unique": "_unique", "where": "where|nonzero", "__format__": "__format__|item", "index_put_": "index_put"}
    names |= {"__float__": "__float__|item|_local_scalar_dense", "__bool__": "__bool__|is_nonzero"}
    with torch.inference_mode(inference), pytest.raises(CaptureError, match=names.get(how, how)):
        recorder.record(lambda: PLACES[place](x, how))
    check(Recorded(lambda x: x * 2, recorder=recorder), (3,))


def test_reads_are_seen_below_the_mark_inside_a_call_that_hides_them() -> None:
    # A function mode is off while it handles a call; a backend that runs inside of one is marked with below().
    seen: list[bool] = []

    def backend(x: Tensor) -> Tensor:
        with below():
            seen.append(True)
            x.tolist()
        return x

    class Wrapper:
        @classmethod
        def __torch_function__(cls, func: object, types: object, args: tuple, kwargs: object = None) -> Tensor:
            return backend(args[1])

    with pytest.raises(CaptureError, match="tolist"):
        TapeRecorder().record(lambda: torch.add(Wrapper(), torch.ones(2)))  # type: ignore[call-overload]
    assert seen


def test_what_only_looks_like_a_host_read_is_recorded() -> None:
    def run(x: Tensor) -> Tensor:
        lengths = torch.tensor([3, 5])
        h = x.repeat_interleave(2, dim=1).repeat_interleave(torch.ones(8, dtype=torch.long), dim=0, output_size=8)
        return h + torch.repeat_interleave(torch.arange(2), lengths, output_size=8)[:, None] + len(x) + x.dim()

    with torch.inference_mode():
        check(Recorded(run))


def test_one_hot_of_a_given_size_is_not_refused_where_it_reads_nothing() -> None:
    with torch.inference_mode():
        check(Recorded(lambda x: F.one_hot(x[:, 0].abs().long().clamp(max=3), 4).float()))


def test_a_recording_within_a_recording_is_refused() -> None:
    recorder = TapeRecorder()
    with pytest.raises(CaptureError, match="under way"):
        recorder.record(lambda: recorder.record(lambda: None))
    check(Recorded(lambda x: x + 1, recorder=recorder))


@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyboardInterrupt])
def test_b74_a_failure_in_the_middle_leaves_all_as_it_was(error: type[BaseException]) -> None:
    recorder = TapeRecorder()
    before = Recorded(lambda x: x * 2, recorder=recorder)
    x, out = torch.randn(8, 4), torch.full((8, 4), 7.0)

    def run() -> None:
        out.copy_(x + torch.rand(8, 4))
        raise error("in the middle")

    state = torch.get_rng_state()
    with pytest.raises(error, match="in the middle"), recorder.session():
        recorder.record(run)
    assert gc.isenabled()
    assert torch.equal(out, torch.full((8, 4), 7.0))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.overrides._get_current_function_mode_stack()
    assert x.tolist()  # host reads are allowed again
    check(before)
    check(Recorded(lambda x: x * 3, recorder=recorder))
    assert len(recorder.tapes) == 1  # the last one was dropped with what held it
