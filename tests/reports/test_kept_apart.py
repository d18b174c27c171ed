"""Models, caches and orders of writing that a compiler could mix up."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fullgraph_compile as fgc
from fullgraph_compile.attention.kv_write import write_site
from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.batch import StaticBatch
from fullgraph_compile.ops import AttentionSite
from fullgraph_compile.program import Program
from tests.models import T2, Layer, tiny, tokens
from tests.paged.engine import Engine, cache_for, texts
from tests.reports.cases import TAPE, known_as, pair

OPTIONS: dict[str, Any] = {"buckets": [8, 16], "request_slots": 4, **TAPE}


def test_b103_models_of_one_shape_share_nothing() -> None:
    class Biased(T2):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return super().forward(input_ids, position_ids) + 0.5

    class Wide(T2):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                assert isinstance(layer, Layer)
                layer.mlp = nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 32, bias=False))

    made = [pair(module(), **OPTIONS) for module in (T2, Biased, Wide)]
    results = []
    for lengths, bucket in (([5, 2], 8), ([12], 16), ([5, 2], 8)):
        results.append([one.same(lengths, bucket=bucket) for one in made])
    plain, biased, wide = results[0]
    assert (biased - plain).abs().max() > 0.4 and (wide - plain).abs().max() > 1e-2
    caps = {cap: tiny("Gemma2", attn_implementation="eager", attn_logit_softcapping=cap) for cap in (0.5, 50.0)}
    wanted = {cap: copy.deepcopy(model) for cap, model in caps.items()}
    ids = tokens(9)[None]
    with torch.inference_mode():
        for cap, model in caps.items():
            got = fgc.compile(model, **OPTIONS)(input_ids=ids, use_cache=False)[0]
            torch.testing.assert_close(got, wanted[cap](input_ids=ids, use_cache=False)[0], rtol=1e-4, atol=2e-5)


class Ordered(ReferenceAttention):
    """Sees what is in the pages when keys are read."""

    name: ClassVar[str] = "ordered"
    seen: ClassVar[list[tuple[int, bool]]] = []

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Any, slopes: Any, site: Any, static: StaticBatch) -> Tensor:
        if static.cache is not None:
            n = int(static.num_real_tokens)
            assert static.slot_ids is not None
            stored = static.cache.k[site.index].flatten(0, 1)[static.slot_ids[:n]]
            self.seen.append((site.index, torch.equal(stored, k[:n])))
        return super().run(q, k, v, sinks, slopes, site, static)


def test_b104_new_keys_are_in_the_pages_before_they_are_read_and_no_pool_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Ordered.seen.clear()
    with known_as("ordered", Ordered):
        body = fgc.compile(tiny("Llama"), **OPTIONS | {"attention": "ordered", "graphs": "none"})
        fgc.warmup(body)
    cache = cache_for(body, pages=5000)
    pools = {t.untyped_storage().data_ptr() for t in (*cache.k, *cache.v)}
    sizes, stores = [0], []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in pools:
                    sizes.append(t.untyped_storage().nbytes())
            return out

    def watched(self: Program, inputs: Sequence[Any], static: StaticBatch) -> list[Tensor]:
        with Sizes():
            return run(self, inputs, static)

    def counted(k: Tensor, v: Tensor, site: AttentionSite, static: StaticBatch) -> None:
        stores.append(site.index)
        write_site(k, v, site, static)

    run = Program.run
    monkeypatch.setattr(Program, "run", watched)
    monkeypatch.setattr("fullgraph_compile.program.write_site", counted)
    engine = Engine(body, cache, texts(20))
    engine.step({0: 12})
    engine.step({0: 8})
    engine.check(tiny("Llama"))
    assert stores == [0, 1, 0, 1], "once at each site, in the order of the reads"
    assert Ordered.seen == [(0, True), (1, True)] * 2
    assert 0 < max(sizes) < cache.k[0].nbytes
