"""The ways in: ``fgc.compile`` on a body and on a whole model, and plain ``torch.compile``."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from tests.models import T2, tiny, tiny_causal_lm, tokens

TAPE: dict[str, Any] = {"graphs": "tape", "compiler": "aot_eager"}
# Where neither what is generated nor what two layers share is in question.
FAST: dict[str, Any] = {"graphs": "tape", "compiler": "eager"}
ONE: dict[str, Any] = {"num_hidden_layers": 1}


def per_request(model: nn.Module, ids: Tensor, lengths: list[int]) -> Tensor:
    """Each request alone through the model as it was: the meaning of a packed batch."""
    rows, start = [], 0
    with torch.no_grad():
        for n in lengths:
            if n:
                positions = torch.arange(n)[None]
                one = ids[None, start : start + n]
                kwargs = {} if isinstance(model, T2) else {"use_cache": False}
                out = model(input_ids=one, position_ids=positions, **kwargs)
                rows.append(out if isinstance(out, Tensor) else out[0])
            start += n
    return torch.cat(rows, dim=1)[0]


def packed(body: nn.Module, ids: Tensor, lengths: list[int], **kwargs: Any) -> Tensor:
    batch = fgc.PrefillBatch(lengths, device="cpu")
    with torch.inference_mode(), batch:
        out = body(input_ids=ids[None], position_ids=batch.position_ids[None], **kwargs)
    return (out if isinstance(out, Tensor) else out[0])[0]


def replays(body: Any) -> int:
    return sum(fgc.report(body).replays.values())


def equal(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5 * float(want.abs().max()))


LENGTHS = [[5], [1], [2], [3, 4], [30], [1, 1, 1], [20, 7, 5], [64], [16] * 4, [1] * 16, [33, 31], [7]]


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3"])
def test_packed_requests_equal_each_request_alone(name: str) -> None:
    body = tiny(name)
    eager = copy.deepcopy(body)
    if name == "Gemma2":
        eager.set_attn_implementation("eager")  # sdpa drops the soft cap
    fgc.compile(body, max_tokens=64, **TAPE)
    for i, lengths in enumerate(LENGTHS):
        ids = tokens(sum(lengths), seed=i)
        equal(packed(body, ids, lengths, use_cache=False), per_request(eager, ids, lengths))
    report = fgc.report(body)
    assert sum(report.replays.values()) == len(LENGTHS)
    assert not report.fallbacks
    assert report.compiles == 1
    assert len(report.sites) == 2


def test_gemma_2_would_differ_without_its_soft_cap() -> None:
    body = tiny("Gemma2")
    eager = copy.deepcopy(body)
    eager.set_attn_implementation("eager")
    uncapped = copy.deepcopy(eager)
    for layer in uncapped.layers:
        layer.self_attn.attn_logit_softcapping = None
    ids = tokens(9)
    difference = per_request(eager, ids, [9]) - per_request(uncapped, ids, [9])
    assert float(difference.abs().max()) > 1e-2
    fgc.compile(body, max_tokens=16, **TAPE)
    equal(packed(body, ids, [9], use_cache=False), per_request(eager, ids, [9]))


def test_token_counts_up_to_the_ladder_and_above_it_are_one_compile() -> None:
    body = tiny("Llama", max_position_embeddings=4096, **ONE)
    eager = copy.deepcopy(body)
    fgc.compile(body, max_tokens=2048, buckets=[8, 64, 2048], **FAST)
    for n in (1, 2, 3, 30, 2047, 2048):
        ids = tokens(n, seed=n)
        equal(packed(body, ids, [n], use_cache=False), per_request(eager, ids, [n]))
    assert replays(body) == 6
    ids = tokens(2049)
    equal(packed(body, ids, [1024, 1025], use_cache=False), per_request(eager, ids, [1024, 1025]))
    report = fgc.report(body)
    assert sum(report.replays.values()) == 6
    assert report.fallbacks == {Reason.OVER_LADDER: 1}
    assert report.compiles == 1


def test_one_to_slots_requests_share_a_graph_and_more_run_compiled() -> None:
    body = tiny("Llama", **ONE)
    eager = copy.deepcopy(body)
    fgc.compile(body, buckets=[16], request_slots=4, **FAST)
    for requests in (1, 2, 3, 4, 3, 1, 4):
        ids = tokens(12, seed=requests)
        lengths = [12 // requests] * requests
        equal(packed(body, ids, lengths, use_cache=False), per_request(eager, ids, lengths))
    assert fgc.report(body).replays == {16: 7}
    ids = tokens(10)
    equal(packed(body, ids, [2] * 5, use_cache=False), per_request(eager, ids, [2] * 5))
    assert fgc.report(body).fallbacks == {Reason.OVER_SLOTS: 1}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_every_compiler_runs_the_same_body(compiler: str) -> None:
    body = tiny("Qwen3")
    eager = copy.deepcopy(body)
    graphs = "none" if compiler == "inductor" else "tape"
    fgc.compile(body, max_tokens=32, compiler=compiler, graphs=graphs)
    for lengths in ([5], [1], [3, 4], [20, 9]):
        ids = tokens(sum(lengths))
        equal(packed(body, ids, lengths, use_cache=False), per_request(eager, ids, lengths))
    report = fgc.report(body)
    assert report.compiles == 1
    assert sum(report.replays.values()) == (0 if graphs == "none" else 4)
    assert report.fallbacks == ({Reason.GRAPHS_OFF: 4} if graphs == "none" else {})


# -- a whole model with its head ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, torch.tensor([0, 2])], ids=["all", "last", "rows"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_logits_of_a_causal_lm_for_every_logits_to_keep(name: str, keep: Any) -> None:
    model = tiny_causal_lm(name, **ONE)
    if name == "Gemma2":
        model.set_attn_implementation("eager")
    eager = copy.deepcopy(model)
    fgc.compile(model, max_tokens=32, **TAPE)
    for n in (6, 9, 3, 30):
        ids = tokens(n)[None]
        with torch.no_grad():
            got = model(input_ids=ids, use_cache=False, logits_to_keep=keep)
            want = eager(input_ids=ids, use_cache=False, logits_to_keep=keep)
        assert type(got) is type(want)
        equal(got.logits, want.logits)
    report = fgc.report(model)
    assert sum(report.replays.values()) == 4
    assert report.compiles == 1


def test_b72_the_head_is_outside_of_the_graph() -> None:
    model = tiny_causal_lm("Llama", vocab_size=4096, **ONE)
    fgc.compile(model, max_tokens=32, **FAST)
    with torch.no_grad():
        model(input_ids=tokens(5)[None], use_cache=False)
    (graph,) = model.model.forward.graphs()
    for bucket in graph.runner.buckets.values():
        assert [tuple(t.shape) for t in bucket.outputs] == [(1, bucket.tokens, 32)]


def test_all_forms_of_the_call_live_side_by_side() -> None:
    model = tiny_causal_lm("Llama", **ONE)
    eager = copy.deepcopy(model)
    fgc.compile(model, max_tokens=32, **FAST)
    for _ in range(2):
        for keep in (0, 1, torch.tensor([1]), torch.tensor([0, 3])):
            for n in (7, 4):
                ids = tokens(n)[None]
                with torch.no_grad():
                    got = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
                    equal(got, eager(input_ids=ids, use_cache=False, logits_to_keep=keep).logits)
    assert fgc.report(model).compiles == 1
    assert replays(model) == 16


# -- without a batch ---------------------------------------------------------------------------------------------------


def test_without_a_batch_a_call_means_what_eager_means() -> None:
    body = tiny("Llama", **ONE)
    eager = copy.deepcopy(body)
    fgc.compile(body, max_tokens=32, **FAST)
    ids = tokens(9)[None]
    restarting = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    with torch.no_grad():
        for positions in (None, torch.arange(9)[None], restarting, torch.arange(9)[None] + 3):
            got = body(input_ids=ids, position_ids=positions, use_cache=False)[0]
            want = eager(input_ids=ids, position_ids=positions, use_cache=False)[0]
            equal(got, want)
    assert replays(body) == 4
    assert fgc.report(body).compiles == 1


# -- plain torch.compile -----------------------------------------------------------------------------------------------


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
