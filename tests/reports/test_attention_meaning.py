"""What an attention call means, where models differ from the plain causal decoder: bodies of our own, over a cache."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile import Reason, ops
from fullgraph_compile.cache import PagedKVCache
from fullgraph_compile.staging import Poison
from tests.models import T2, VOCABULARY, Layer, tokens
from tests.paged.engine import Engine, texts
from tests.reports.cases import TAPE, Pair, equal, only, packed, pair

OPTIONS: dict[str, Any] = {"buckets": [8, 32], "request_slots": 4, **TAPE}


class Own(nn.Module):
    """A body of given attention calls, each with geometry and a mask of its own; all claim to be layer 0."""

    layer_idx = 0

    def __init__(self, *geometry: tuple[int, int, int, int], slopes: Tensor | None = None, left: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.geometry, self.left = geometry, left
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.place = nn.Embedding(256, 32)
        self.q = nn.ModuleList([nn.Linear(32, h * s) for h, _, s, _ in geometry])
        self.k = nn.ModuleList([nn.Linear(32, kv * s) for _, kv, s, _ in geometry])
        self.v = nn.ModuleList([nn.Linear(32, kv * s) for _, kv, s, _ in geometry])
        self.out = nn.ModuleList([nn.Linear(h * s, 32) for h, _, s, _ in geometry])
        self.register_buffer("slopes", slopes)

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> tuple[Tensor]:
        x = (self.embed(input_ids) + self.place(position_ids))[0]
        for i, (_, _, size, right) in enumerate(self.geometry):
            q, k, v = (m[i](F.layer_norm(x, (32,))).unflatten(-1, (-1, size)) for m in (self.q, self.k, self.v))
            a = self.attend(q, k, v, right)
            x = x + self.out[i](a.flatten(1))
        return (x[None],)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, right: int) -> Tensor:
        return ops.attention(q, k, v, None, self.slopes, q.shape[-1] ** -0.5, self.left, right, 0.0, -1)


class Explicit(Own):
    """The same by a bias on the scores of torch's own attention: what the op must mean."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, right: int) -> Tensor:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        n = q.shape[1]
        distance = torch.arange(n) - torch.arange(n)[:, None]
        seen = torch.ones(n, n, dtype=torch.bool)
        seen &= distance <= right if right >= 0 else seen
        seen &= distance >= -self.left if self.left >= 0 else seen
        bias = torch.zeros(q.shape[0], n, n) if self.slopes is None else self.slopes[:, None, None] * distance
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias
        return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def own_pair(*geometry: tuple[int, int, int, int], **more: Any) -> tuple[Any, Explicit]:
    """Compiled and called once, and what it must equal."""
    eager = Explicit(*geometry, **more).eval()
    body = fgc.compile(Own(*geometry, **copy.deepcopy(more)).eval(), **OPTIONS)
    packed_rows(body, tokens(5), [5])
    return body, eager


def packed_rows(body: Any, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    with torch.inference_mode(), fgc.PrefillBatch(list(lengths), device="cpu") as batch:
        return body(input_ids=ids[None], position_ids=batch.position_ids[None])[0][0]


def alone(eager: Any, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return torch.cat(
            [eager(input_ids=t[None], position_ids=torch.arange(len(t))[None])[0][0] for t in ids.split(list(lengths))]
        )


def in_chunks(body: Any, eager: Any, *steps: dict[int, int]) -> Engine:
    """Prefill over a cache, and compare with each text alone."""
    engine = Engine(body, PagedKVCache.for_model(body, pages=64, page_size=4), texts(20, 14, 11))
    for graph in body.forward.graphs():
        graph.runner.poison = Poison.IMPOSSIBLE
    for step in steps:
        engine.step(step)
    for r, text in enumerate(engine.texts):
        if engine.done[r]:
            want = alone(eager, text[: engine.done[r]], [engine.done[r]])
            torch.testing.assert_close(torch.cat(engine.hidden[r]), want, rtol=1e-4, atol=2e-5)
    return engine


CHUNKS = ({0: 12}, {0: 5, 1: 6}, {1: 8, 2: 11, 0: 3})


# -- slopes ------------------------------------------------------------------------------------------------------------

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def test_b42_slopes_are_those_that_were_given() -> None:
    body, eager = own_pair((4, 4, 8, 0), slopes=SLOPES)
    in_chunks(body, eager, *CHUNKS)
    # The second half of the heads, as a rank of two would hold it: its slopes, and not the first ones of two heads.
    half, half_eager = own_pair((2, 2, 8, 0), slopes=SLOPES[2:])
    ids = in_chunks(half, half_eager, *CHUNKS).texts[0]
    first = Explicit((2, 2, 8, 0), slopes=SLOPES[:2])
    assert (alone(half_eager, ids, [20]) - alone(first, ids, [20])).abs().max() > 1e-2
    assert not fgc.report(body).fallbacks and not fgc.report(half).fallbacks


def test_b42_new_values_of_slopes_show_in_the_next_replay() -> None:
    body, eager = own_pair((4, 4, 8, 0), slopes=SLOPES)
    ids = tokens(7)
    before = packed_rows(body, ids, [7])
    with torch.no_grad():
        for module in (body, eager):
            module.slopes.mul_(-3.0)
    after = packed_rows(body, ids, [7])
    equal(after, alone(eager, ids, [7]))
    assert (after - before).abs().max() > 1e-2
    assert not fgc.report(body).fallbacks


def test_b42_slopes_that_a_model_adds_by_itself_are_found_in_its_graph() -> None:
    def bloom() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
        return transformers.BloomModel(config).eval()

    body, eager = fgc.compile(bloom(), **OPTIONS), bloom()
    ids = tokens(9)[None]
    with torch.inference_mode():
        equal(body(input_ids=ids, use_cache=False)[0], eager(input_ids=ids, use_cache=False)[0])
    report = fgc.report(body)
    assert sum(report.replays.values()) == 1 and not report.fallbacks
    assert [site.slopes for site in report.sites] == [True, True]


def test_b43_a_cache_of_scaled_8_bit_values_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        PagedKVCache([(2, 8, 8)], pages=4, page_size=4, dtype=torch.float8_e4m3fn, device="cpu")


# -- sites of several geometries ---------------------------------------------------------------------------------------


def test_b48_b52_sites_are_told_apart_by_their_call_and_sized_by_their_tensors() -> None:
    """Calls that claim one layer id; group sizes 2 and 3, head sizes 8 and 16."""
    body, eager = own_pair((4, 2, 8, 0), (6, 2, 16, 0), (3, 1, 4, 0))
    sites = fgc.report(body).sites
    assert [(s.index, s.heads, s.kv_heads, s.head_size) for s in sites] == [(0, 4, 2, 8), (1, 6, 2, 16), (2, 3, 1, 4)]
    engine = in_chunks(body, eager, *CHUNKS)
    assert engine.cache.sites == ((2, 8, 8), (2, 16, 16), (1, 4, 4))
    equal(packed_rows(body, tokens(13), [6, 7]), alone(eager, tokens(13), [6, 7]))
    assert not fgc.report(body).fallbacks


@pytest.mark.parametrize("left", [-1, 2])
def test_b50_two_sided_attention_stays_two_sided(left: int) -> None:
    body, eager = own_pair((4, 2, 8, max(left, -1)), (4, 2, 8, max(left, -1)), left=left)
    lengths = [6, 7]
    got = packed_rows(body, tokens(13), lengths)
    equal(got, alone(eager, tokens(13), lengths))
    causal = Explicit((4, 2, 8, 0), (4, 2, 8, 0), left=left)
    assert (got - alone(causal, tokens(13), lengths)).abs().max() > 1e-2
    assert fgc.report(body).replays[32] == 1


def test_b51_cross_attention_is_never_left_out() -> None:
    import transformers

    def decoder() -> Any:
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4
        )
        return transformers.T5Model(config).eval().decoder

    body, eager = fgc.compile(decoder(), **OPTIONS), decoder()
    ids, results = tokens(7)[None], []
    with torch.inference_mode():
        for n in (6, 3, 6):
            encoded = torch.randn(1, n, 32, generator=torch.Generator().manual_seed(n))
            call = {"input_ids": ids, "encoder_hidden_states": encoded, "use_cache": False}
            results.append(body(**call)[0])
            equal(results[-1], eager(**call)[0])
    assert (results[0] - results[1]).abs().max() > 1e-2, "what was encoded counts"


# -- rows that are not the tokens --------------------------------------------------------------------------------------


class FewerRows(T2):
    """Its second layer sees a few rows only, of which the call says which."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor) -> Tensor:
        x = self.layers[0](self.embed(input_ids) + self.place(position_ids))
        layer = self.layers[1]
        assert isinstance(layer, Layer)
        few = x.index_select(1, rows)
        return self.norm(few + layer.mlp(layer.norm2(few)))


@pytest.mark.parametrize("lengths", [[5, 3], [2, 2, 2, 2], [8], [9, 4]])
def test_b49_a_second_count_of_rows_is_not_the_token_count(lengths: list[int]) -> None:
    eager = FewerRows().eval()
    body = fgc.compile(FewerRows().eval(), **OPTIONS)
    for seed in (1, 2):
        ids = tokens(sum(lengths), seed=seed)
        batch = fgc.PrefillBatch(lengths, device="cpu")
        got = packed(body, ids, lengths, rows=batch.last_token_rows)
        parts = [packed(eager, t, [len(t)], rows=torch.tensor([len(t) - 1])) for t in ids.split(lengths)]
        equal(got, torch.cat(parts))
        assert got.shape == (len(lengths), 32)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class Hybrid(T2):
    """Attention, a layer without, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.between = Mlp()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        return self.norm(self.layers[1](self.between(self.layers[0](x))))


def test_b53_layers_without_attention_are_no_reason_against_graphs() -> None:
    made: Pair = pair(Hybrid(), buckets=[8, 32])
    assert [site.module for site in made.report.sites] == ["layers.0", "layers.1"]
    made.same([3, 2], bucket=8)
    made.same([9, 7], bucket=32)


def test_b53_a_body_without_attention_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.mlp = nn.Embedding(VOCABULARY, 32), Mlp()

        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return self.mlp(self.embed(input_ids))

    body, eager = fgc.compile(Plain().eval(), **OPTIONS), Plain().eval()
    ids = tokens(6)[None]
    with caplog.at_level(logging.WARNING, "fullgraph_compile"), torch.inference_mode():
        equal(body(ids, torch.arange(6)[None]), eager(ids, None))
    only(fgc.report(body), Reason.NO_SITES, 1)
    assert Reason.NO_SITES.value in caplog.text
