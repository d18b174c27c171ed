"""Padded rows hold ordinary activations; none of them may reach a real row.

An attention backend's own duty, zeros in every row past the real total (B02), is tested with the backends.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason
from fullgraph_compile.staging import Poison
from tests.models import T2, tokens
from tests.reports.cases import DRESSES, TAPE, Recurrent, equal, one_call, only, packed, pair, per_request, seen_by

# -- one scale for many rows -------------------------------------------------------------------------------------------


class Quantised(T2):
    """Rounds the rows between its layers to multiples of a scale, which it returns too."""

    def __init__(self, scales: str) -> None:
        super().__init__()
        self.scales = scales

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        x = self.layers[0](self.embed(input_ids) + self.place(position_ids))
        if self.scales == "one for all rows":
            scale = x.abs().amax() / 15
        elif self.scales == "one for 4 rows":
            tiles = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4))
            scale = tiles.abs().amax((-1, -2), keepdim=True).expand_as(tiles).flatten(1, 2)[:, : x.shape[1]] / 15
        else:
            scale = x.abs().amax(-1, keepdim=True) / 15
        return self.norm(self.layers[1]((x / scale).round() * scale)), scale


@pytest.mark.parametrize("scales", ["one for all rows", "one for 4 rows"])
def test_b01_b10_a_scale_shared_by_rows_is_refused_and_equals_eagers(scales: str) -> None:
    module = Quantised(scales).eval()
    eager = copy.deepcopy(module)
    fgc.compile(module, buckets=[8], **TAPE)
    for n in (5, 7, 5):
        for graph in module.forward.graphs():
            graph.runner.poison = Poison.IMPOSSIBLE
        got, want = one_call(module, n, seed=n), one_call(eager, n, seed=n)
        equal(got[0], want[0])
        equal(got[1].contiguous(), want[1].contiguous())
    report = fgc.report(module)
    only(report, Reason.UNPROVEN, 3)
    assert "test_padding_leaks.py" in report.details[Reason.UNPROVEN], "the refusal names the source line"


def test_b01_a_scale_for_each_row_is_captured() -> None:
    quantised = pair(Quantised("one for each row"), buckets=[8])
    for poison in DRESSES:
        quantised.dress(poison)
        for lengths in ([5], [3, 4], [1]):
            quantised.same(lengths, bucket=8)


# -- masks by the number of real tokens --------------------------------------------------------------------------------


class Gated(T2):
    """Sets rows from ``n_real`` on to zero between its layers."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, n_real: Tensor) -> Tensor:
        x = self.layers[0](self.embed(input_ids) + self.place(position_ids))
        x = x * (torch.arange(x.shape[1], device=x.device) < n_real)[:, None]
        return self.norm(self.layers[1](x))


def test_b03_a_count_of_real_tokens_is_read_at_each_replay() -> None:
    module = Gated().eval()
    eager = copy.deepcopy(module)
    fgc.compile(module, buckets=[8], **TAPE)
    calls = [(5, 5), (7, 7), (5, 5), (5, 3), (7, 1), (5, 5)]
    for poison in DRESSES:
        for n, real in calls:
            equal(*(one_call(m, n, seed=n, n_real=torch.tensor(real)) for m in (module, eager)))
            for graph in module.forward.graphs():
                graph.runner.poison = poison
    report = fgc.report(module)
    assert report.replays == {8: len(calls) * len(DRESSES)}
    assert report.compiles == 1


# -- collectives -------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Two of four experts for each row, weighted by a router, and one that all rows share."""

    def __init__(self, hidden: int = 32, *, reduced: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, 4)
        self.experts = nn.Parameter(torch.randn(4, hidden, hidden) * 0.3)
        self.shared = nn.Linear(hidden, hidden)
        self.reduced = reduced

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        gates = torch.zeros_like(x[..., :4]).scatter(-1, chosen, weights)
        y = torch.einsum("bth,ehf,bte->btf", x, self.experts, gates) + self.shared(x)
        return torch.ops.fgc_reports.all_reduce(y) if self.reduced else y


def test_b05_a_collective_never_gets_a_padded_row() -> None:
    """Padded rows hold what they hold; an op that is not proven to treat rows apart runs on real rows only."""
    module = T2(mlp=Experts(reduced=True)).eval()
    eager = copy.deepcopy(module)
    fgc.compile(module, buckets=[8], **TAPE)
    for n in (3, 5, 3):
        ids = tokens(n)
        with seen_by("all_reduce") as wanted:
            want = per_request(eager, ids, [n])
        with seen_by("all_reduce") as seen:
            equal(one_call(module, n, seed=1)[0], want)
        assert [t.shape[1] for t in seen] == [n, n]
        for got, expected in zip(seen, wanted, strict=True):
            equal(got, expected)
    report = fgc.report(module)
    only(report, Reason.UNPROVEN, 3)
    assert "all_reduce" in report.details[Reason.UNPROVEN]


def test_b05_experts_with_a_shared_one_replay() -> None:
    experts = pair(T2(mlp=Experts()), buckets=[8, 16])
    for poison in DRESSES:
        experts.dress(poison)
        for lengths, bucket in (([3], 8), ([9, 7], 16), ([3], 8), ([2, 1], 8)):
            experts.same(lengths, bucket=bucket)


# -- memory that a kernel did not write --------------------------------------------------------------------------------


def test_b06_an_encoder_of_three_layers_stays_finite() -> None:
    """A replay of the larger bucket in between leaves NaN in all that the smaller one computed."""
    encoder = pair(T2(layers=3, causal=False), buckets=[16, 32])
    assert [site.mask for site in encoder.report.sites] == ["two-sided"] * 3
    for poison in DRESSES:
        encoder.dress(poison)
        for seed in range(3):
            encoder.same([3, 4], seed=seed, bucket=16)
        encoder.same([30], bucket=32)
        encoder.same([3, 4], bucket=16)
        (rows,) = encoder.graph.runner.buckets[16].outputs
        assert rows.shape[1] == 16
        assert rows.isfinite().all(), "attention writes zeros to the padded rows, so they stay finite too"


class PadsHeads(T2):
    """Pads its head size before attention, as a kernel may ask for, and cuts the result."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        for layer in self.layers:
            q, k, v = layer.qkv(layer.norm1(x)).unflatten(-1, (3, layer.heads, -1)).unbind(-3)
            size = q.shape[-1]
            q, k, v = (nn.functional.pad(t, (0, 8)).transpose(-2, -3) for t in (q, k, v))
            a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=size**-0.5)
            x = x + layer.out(a[..., :size].transpose(-2, -3).flatten(-2))
        return self.norm(x)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_b08_a_pad_before_attention_is_done_at_each_replay(compiler: str) -> None:
    padded = pair(PadsHeads(), buckets=[8], compiler=compiler)
    assert [site.head_size for site in padded.report.sites] == [16, 16]
    for poison in DRESSES:
        padded.dress(poison)
        first, second = (padded.same([5], seed=seed, bucket=8) for seed in (1, 2))
        assert not torch.allclose(first, second, atol=0.1)


def test_b08_no_pass_puts_a_pad_into_the_graph() -> None:
    """Padded rows are rewritten by staging, before a replay; within the graph there is none to be optimised away."""
    (graph,) = pair(T2(), buckets=[8]).graphs
    names = {str(n.target) for kind in graph.runner.program.pieces.kinds for n in kind.graph.nodes}
    assert names
    assert not [n for n in names if any(word in n for word in ("pad", "empty", "zeros", "as_strided", "copy_"))]


# -- the border between body and tail ----------------------------------------------------------------------------------


class WithHead(T2):
    """Ends with an op of which nothing is known."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return torch.ops.fgc_reports.head(super().forward(input_ids, position_ids))


def test_b07_the_tail_gets_the_real_rows_and_no_other() -> None:
    """And of one request at a time, as nothing is known of what it does with them; the body is one replay for all."""
    headed = pair(WithHead(), buckets=[16])
    assert "run outside of the graph, on real rows" in headed.report.proof
    for n in range(1, 17):
        headed.dress(DRESSES[n % 3])
        lengths = [n] if n < 3 else [n // 3, n - n // 3]
        ids, before = tokens(n, seed=n), headed.report.replays[16]
        with seen_by("head") as seen:
            got = packed(headed.body, ids, lengths)
        assert [t.shape[1] for t in seen] == lengths
        equal(got, per_request(headed.eager, ids, lengths))
        assert headed.report.replays[16] == before + 1 and not headed.report.fallbacks
        last = fgc.PrefillBatch(lengths, device="cpu").last_token_rows
        ends = [per_request(headed.eager, part, [len(part)])[-1] for part in tokens(n, seed=n).split(lengths)]
        equal(got[last], torch.stack(ends))


# -- state that outlives the call --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fgc.compile", "torch.compile", "torch.compile of one size"])
def test_b09_a_padded_row_updates_no_state(way: str) -> None:
    """A body that writes to a buffer is not captured; each call updates each slot once."""
    module = Recurrent().eval()
    eager = copy.deepcopy(module)
    body: Any = module
    if way == "fgc.compile":
        fgc.compile(module, buckets=[8], **TAPE)
    else:
        dynamic = False if way.endswith("size") else None
        body = torch.compile(module, backend="full_prefill", options={"buckets": (8,), **TAPE}, dynamic=dynamic)
    slots, fresh = torch.tensor([1, 1, 3, 3, 3]), torch.zeros(5)
    for n in (5, 5, 5, 5) if way.endswith("size") else (5, 4, 5):
        equal(*(one_call(m, n, seed=n, slots=slots[:n], fresh=fresh[:n]) for m in (body, eager)))
        equal(module.state, eager.state)
        assert torch.equal(module.state[[0, 2]], torch.full((2, 32), 7.0))
    report = fgc.report(body)
    assert not report.replays
    assert Reason.UNPROVEN in report.fallbacks
    assert "state" in report.details[Reason.UNPROVEN]
