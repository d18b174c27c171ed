"""Plain ``torch.compile`` with the backend, of models of transformers and of any module as they are."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.models import T2, tiny, tiny_causal_lm, tokens
from tests.packing import ONE, TAPE, equal, packed, per_request, replays


def plain_options(**more: Any) -> dict[str, Any]:
    return {"max_tokens": 64, **TAPE, **more}


@pytest.mark.parametrize("dynamic", [None, True, "mark_dynamic", "mark_unbacked"])
@pytest.mark.parametrize("in_batch", [True, False])
def test_plain_torch_compile_of_an_unmodified_model(dynamic: Any, in_batch: bool) -> None:
    model = tiny("Llama", **ONE)
    eager = copy.deepcopy(model)
    body = torch.compile(
        model, backend="full_prefill", options=plain_options(), dynamic=True if dynamic is True else None
    )
    for i, lengths in enumerate([[5], [7], [3, 4], [9], [20, 3], [64], [65], [1], [2], [7]]):
        batch, ids = fgc.PrefillBatch(lengths, device="cpu"), tokens(sum(lengths), seed=i)[None]
        positions = batch.position_ids[None]
        for t in (ids, positions):
            if dynamic == "mark_dynamic" and ids.shape[1] > 1:
                torch._dynamo.mark_dynamic(t, 1)
            if dynamic == "mark_unbacked":
                torch._dynamo.decorators.mark_unbacked(t, 1, shape_id="tokens")
        with torch.no_grad():
            if in_batch:
                with batch:
                    got = body(input_ids=ids, position_ids=positions, use_cache=False)[0]
            else:
                got = body(input_ids=ids, position_ids=positions, use_cache=False)[0]
        equal(got[0], per_request(eager, ids[0], lengths))
    report = fgc.report(body)
    if dynamic == "mark_unbacked":
        return  # torch's own attention does not trace so: many small graphs, right, and with their reasons
    assert sum(report.replays.values()) >= 7
    assert report.fallbacks[Reason.OVER_LADDER] == 1
    assert set(report.fallbacks) <= {Reason.OVER_LADDER, Reason.STATIC_SHAPE}


def test_a_fixed_shape_is_captured_at_its_third_call_and_says_so() -> None:
    model = tiny("Llama", **ONE)
    eager = copy.deepcopy(model)
    body = torch.compile(model, backend="full_prefill", options=plain_options(), dynamic=False)
    for call in range(1, 6):
        ids = tokens(11, seed=call)
        equal(packed(body, ids, [11], use_cache=False), per_request(eager, ids, [11]))
        assert replays(body) == max(0, call - 2)
    report = fgc.report(body)
    assert report.buckets == (11,)
    assert report.fallbacks == {Reason.STATIC_SHAPE: 2}
    # Several requests in the traced size, told apart by the model's own masks.
    ids = tokens(11)
    equal(packed(body, ids, [4, 7], use_cache=False), per_request(eager, ids, [4, 7]))


def test_plain_torch_compile_of_a_causal_lm() -> None:
    model = tiny_causal_lm("Qwen3")
    eager = copy.deepcopy(model)
    body = torch.compile(model, backend="full_prefill", options=plain_options())
    for n in (5, 8, 13, 3, 30):
        ids = tokens(n)[None]
        with torch.no_grad():
            got = body(input_ids=ids, position_ids=torch.arange(n)[None], use_cache=False, logits_to_keep=1)
            want = eager(input_ids=ids, use_cache=False, logits_to_keep=1)
        assert type(got) is type(want)
        equal(got.logits, want.logits)
    assert replays(body) >= 3


@pytest.mark.parametrize("flat", [True, False], ids=["[T]", "[1, T]"])
def test_plain_module_with_torch_attention(flat: bool) -> None:
    model = T2()
    eager = copy.deepcopy(model)
    model.eval()
    body = torch.compile(model, backend="full_prefill", options=plain_options())
    for i, n in enumerate([5, 9, 30, 64, 2, 7]):
        ids, positions = tokens(n, seed=i), torch.arange(n)
        if not flat:
            ids, positions = ids[None], positions[None]
        with torch.no_grad():
            equal(body(ids, positions), eager(ids, positions))
    assert replays(body) == 5
    # The model's own mask is one request; in a batch it is one for each.
    lengths = [4, 7, 1]
    ids = tokens(12)
    batch = fgc.PrefillBatch(lengths, device="cpu")
    with torch.no_grad(), batch:
        shaped = (ids, batch.position_ids) if flat else (ids[None], batch.position_ids[None])
        got = body(*shaped)
    equal(got if flat else got[0], per_request(eager, ids, lengths))
    assert replays(body) == 6


def test_batch_dims_above_one_run_compiled_with_their_reason() -> None:
    model = tiny("Llama", **ONE)
    eager = copy.deepcopy(model)
    body = torch.compile(model, backend="full_prefill", options=plain_options())
    for shape in ((2, 5), (3, 7), (2, 9)):
        ids = torch.randint(1, 97, shape)
        with torch.no_grad():
            got = body(input_ids=ids, use_cache=False)[0]
            equal(got, eager(input_ids=ids, use_cache=False)[0])
    report = fgc.report(body)
    assert not report.replays
    assert set(report.fallbacks) == {Reason.BATCHED}


def test_the_one_line_needs_no_import_of_the_package() -> None:
    code = (
        "import torch, sys\n"
        "from tests.models import tiny, tokens\n"
        "body = torch.compile(tiny('Llama', num_hidden_layers=1), backend='full_prefill',"
        " options={'max_tokens': 32, 'graphs': 'tape', 'compiler': 'eager'})\n"
        "with torch.no_grad():\n"
        "    for n in (5, 7, 9): out = body(input_ids=tokens(n)[None], use_cache=False)\n"
        "import fullgraph_compile as fgc\n"
        "print(sum(fgc.report(body).replays.values()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) == 2
