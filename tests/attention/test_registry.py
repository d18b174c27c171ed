"""Which backend is taken, and what is said of one that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fullgraph_compile import attention
from fullgraph_compile.attention import (
    AttentionBackend,
    Sentinel,
    UnsupportedAttention,
    attention_names,
    create_attention,
    register,
)
from fullgraph_compile.attention.reference import ReferenceAttention
from fullgraph_compile.attention.varlen import VarlenAttention
from fullgraph_compile.ops import AttentionSite
from tests.attention.cases import SITE

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_backends", dict(attention._backends))
    yield


class Odd(ReferenceAttention):
    """Serves an odd number of heads."""

    name = "odd"

    def supports(self, site: AttentionSite, device: torch.device) -> list[str]:
        return [] if site.heads % 2 else [f"{site.heads} heads are even"]


def test_the_names_are_those_that_the_option_takes() -> None:
    assert attention_names() == (
        "auto",
        "flash_attn",
        "flashinfer",
        "flashinfer_fa2",
        "flashinfer_fa3",
        "reference",
        "triton",
        "varlen",
    )
    register("odd", Odd)
    assert "odd" in attention_names()


@pytest.mark.parametrize("name", ["flash", "", "Auto"])
def test_an_unknown_name_is_an_error_with_the_valid_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' is not known; valid are 'auto', 'flash_attn', 'flashinfer', "):
        create_attention(name, [SITE], CPU)
    assert create_attention("auto", [SITE], CPU).name == "reference"


def test_a_named_backend_that_cannot_is_an_error_by_site_and_reason() -> None:
    register("odd", Odd)
    sites = [replace(SITE, heads=3, kv_heads=1, module="layers.0.attn"), replace(SITE, module="layers.1.attn")]
    assert isinstance(create_attention("odd", sites[:1], CPU), Odd)
    with pytest.raises(UnsupportedAttention, match=r"odd cannot serve layers\.1\.attn \(attention\): 4 heads are even"):
        create_attention("odd", sites, CPU)


def test_many_sites_with_one_reason_are_one_line() -> None:
    register("odd", Odd)
    with pytest.raises(UnsupportedAttention) as caught:
        create_attention("odd", [replace(SITE, module=f"layers.{i}") for i in range(36)], CPU)
    assert caught.value.requested == "odd"
    assert caught.value.reasons == {"odd": ("layers.0 (attention) and 35 more: 4 heads are even",)}


def test_auto_never_takes_the_reference_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VarlenAttention, "supports", lambda self, site, device: ["it is off"] if site.sinks else [])
    assert isinstance(create_attention("auto", [SITE], CUDA), VarlenAttention)
    with pytest.raises(UnsupportedAttention, match=r"varlen cannot serve .*: it is off"):
        create_attention("auto", [SITE, replace(SITE, sinks=True)], CUDA)
    assert isinstance(create_attention("reference", [SITE], CUDA), ReferenceAttention)


def test_auto_takes_no_backend_whose_speed_is_unknown() -> None:
    class Any(ReferenceAttention):
        name = "any"

    register("any", Any)
    assert type(create_attention("auto", [SITE], CPU)) is ReferenceAttention


def test_a_backend_is_known_under_one_name_and_a_name_is_one_backend() -> None:
    register("odd", Odd)
    register("odd", Odd)  # a module that is loaded twice
    with pytest.raises(ValueError, match="'odd' is taken by Odd"):
        register("odd", VarlenAttention)
    with pytest.raises(ValueError, match="'auto' cannot name"):
        register("auto", Odd)
    with pytest.raises(TypeError, match="not a subclass of AttentionBackend"):
        register("odd", object)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["reference", "varlen"])
def test_b22_every_backend_declares_what_an_unused_slot_holds(name: str) -> None:
    assert attention._backends[name].sentinel == Sentinel(q_len=0, k_len=0, page=0)
    assert attention._backends[name].name == name


@pytest.mark.parametrize("sentinel", [None, 0, {"q_len": 0}])
def test_b22_registering_a_backend_without_a_sentinel_is_an_error(sentinel: object) -> None:
    class Undeclared(AttentionBackend):
        name = "undeclared"

        def supports(self, site, device):
            return []

        def run(self, q, k, v, sinks, slopes, site, static):
            return q

    if sentinel is not None:
        Undeclared.sentinel = sentinel  # type: ignore[assignment]
    with pytest.raises(TypeError, match="Undeclared declares no sentinel"):
        register("undeclared", Undeclared)
    assert "undeclared" not in attention_names()
