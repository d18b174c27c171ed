"""The conformance battery lets right backends pass, and catches each kind of fault by a wrong value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fullgraph_compile import attention
from fullgraph_compile.attention import conformance
from fullgraph_compile.attention.conformance import Conformance, check_attention, register_attention
from fullgraph_compile.attention.dense import Operands, dense
from fullgraph_compile.attention.probes import FEATURES, probes
from tests.attention.broken import BROKEN, BROKEN_PAGED, LeavesPaddedRows, Sound
from tests.attention.cases import SITE
from tests.attention.oracle import attend_requests


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_backends", dict(attention._backends))
    yield


@pytest.fixture
def few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short battery."""
    kept = ("padded rows are zeros", "soft cap", "sinks")
    monkeypatch.setattr(conformance, "probes", lambda *args: tuple(p for p in probes(*args) if p.name in kept))


class Unpaged(Sound):
    paged = False


def by_name(found: Conformance) -> dict[str, conformance.ProbeResult]:
    return {r.probe: r for r in found.results}


# -- who passes --------------------------------------------------------------------------------------------------------


def test_the_reference_passes_all() -> None:
    found = check_attention("reference", "cpu")
    assert found.ok and not found.failed, str(found)
    assert (found.backend, found.device.type, found.dtype) == ("reference", "cpu", torch.float32)
    skipped = [r.probe for r in found.results if r.skipped]
    assert skipped == ([] if attention._backends["reference"].paged else ["pages"])
    assert {r.probe for r in found.results} >= BROKEN.keys(), "every probe that a test breaks is played"


def test_every_probe_has_a_broken_backend() -> None:
    # Head sizes, page sizes and dtypes have one each for their kind.
    alike = ("heads of", "pages of", "bfloat16", "float16")
    names = {p.name for p in probes(lambda changes: True, (torch.bfloat16, torch.float16))}
    caught = {name.removesuffix(", paged") for name in (*BROKEN, *BROKEN_PAGED)}
    assert {n for n in names - caught if not n.startswith(alike)} == set()


@pytest.mark.parametrize("probe", [p.name for p in probes(lambda changes: True, ()) if p.layouts == ("paged",)])
def test_a_right_backend_passes_each_probe_of_pages(probe: str) -> None:
    found = check_attention(Sound, "cpu", only=[probe])
    assert found.ok and len(found.results) == 1 and not found.results[0].skipped, str(found)


def test_features_show_in_bf16_too() -> None:
    # The coarsest tolerance: an answer without the feature must still be told apart.
    found = check_attention(Unpaged, "cpu", torch.bfloat16, only=[*FEATURES])
    assert found.ok and found.dtype is torch.bfloat16, str(found)
    assert not any(r.skipped for r in found.results)


# -- who is caught -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", BROKEN)
def test_a_fault_is_caught_by_its_probe_as_a_wrong_value(probe: str) -> None:
    kind, passed = BROKEN[probe]
    found = by_name(check_attention(kind, "cpu", only=[probe, passed]))
    assert not found[probe].ok and "instead of" in found[probe].detail, found[probe]
    assert found[passed].ok and not found[passed].skipped, found[passed]


@pytest.mark.parametrize("probe", BROKEN_PAGED)
def test_a_fault_with_pages_is_caught_by_its_probe_as_a_wrong_value(probe: str) -> None:
    kind, passed = BROKEN_PAGED[probe]
    found = by_name(check_attention(kind, "cpu", only=[probe, passed]))
    assert not found[probe].ok and "instead of" in found[probe].detail, found[probe]
    assert found[passed].ok and not found[passed].skipped, found[passed]


# Heads that are read as if they had no groups are those of other requests too, where a backend sees all rows at once.
@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in ("GQA", "MQA")])
def test_a_dropped_feature_is_said_to_be_dropped(feature: str) -> None:
    (result,) = check_attention(BROKEN[feature][0], "cpu", only=[feature]).results
    assert result.detail.endswith("it is the answer without the feature")


def test_an_exception_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raises(Unpaged):
        def change(self, site, operands, static):
            if site.softcap:
                raise NotImplementedError("no cap here")
            return site, operands, static

    found = by_name(check_attention(Raises, "cpu", only=["soft cap", "causal"]))
    assert found["soft cap"].detail == "NotImplementedError: no cap here" and not found["soft cap"].ok
    assert found["causal"].ok


def test_a_host_read_is_a_result() -> None:
    class Reads(Unpaged):
        def change(self, site, operands, static):
            int(static.k_lens.max())
            return site, operands, static

    (result,) = check_attention(Reads, "cpu", only=["causal"]).results
    assert "cannot be captured" in result.detail and "reads a tensor on the host" in result.detail


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda out: out.double(), "torch.float64 instead of torch.float32"),
        (lambda out: out[:, :1].clone(), "shape [160, 1, 64] instead of [160, 4, 64]"),
        (lambda out: out.transpose(0, 1).contiguous().transpose(0, 1), "not contiguous"),
    ],
)
def test_an_output_of_another_form_is_a_fault(change: Any, said: str) -> None:
    class Forms(Unpaged):
        def finish(self, out, operands, static):
            return change(out)

    (result,) = check_attention(Forms, "cpu", only=["causal"]).results
    assert not result.ok and said in result.detail


# -- what is not supported ---------------------------------------------------------------------------------------------


def test_what_is_not_supported_is_no_failure() -> None:
    class Plain(Unpaged):
        def supports(self, site, device):
            return ["it has no sinks"] * site.sinks + ["it takes heads of 64"] * (site.head_size != 64)

        def change(self, site, operands, static):
            assert not site.sinks and site.head_size == 64
            return site, operands, static

    found = by_name(check_attention(Plain, "cpu", only=["sinks", "heads of 128", "heads of 64", "features together"]))
    assert all(r.ok for r in found.values())
    assert found["sinks"].skipped == "it has no sinks" and found["sinks"].word == "not supported"
    assert found["heads of 128"].skipped == "it takes heads of 64"
    assert not found["heads of 64"].skipped and not found["features together"].skipped


def test_page_sizes_are_asked_for() -> None:
    class Large(Sound):
        def supports_pages(self, page_size, device):
            return [] if page_size % 64 == 0 else [f"pages of {page_size} tokens are no multiple of 64"]

    found = by_name(check_attention(Large, "cpu", only=["prefixes", "pages of 16 tokens", "pages of 64 tokens"]))
    assert all(r.ok for r in found.values())
    assert found["pages of 16 tokens"].skipped == "pages of 16 tokens are no multiple of 64"
    assert not found["prefixes"].skipped and not found["pages of 64 tokens"].skipped


def test_a_backend_that_cannot_run_here_is_unsupported() -> None:
    found = check_attention("varlen", "cpu")
    assert not found.ok and not found.results
    assert "the device is cpu; it runs on CUDA only" in found.unsupported
    assert str(found).startswith("varlen on cpu, float32: unsupported: the device is cpu")


def test_the_first_dtype_and_head_size_that_it_supports_are_taken() -> None:
    class Half(Unpaged):
        def supports(self, site, device):
            return [] if site.dtype is torch.float16 and site.head_size == 128 else ["no"]

    found = check_attention(Half, "cpu", only=["changed lengths", "float32"])
    assert found.ok and found.dtype is torch.float16
    assert by_name(found)["float32"].skipped == "no"
    assert check_attention(Half, "cpu", torch.float32).unsupported == ("no",)


# -- the result, and who may be registered -----------------------------------------------------------------------------


def test_the_result_is_a_table_that_names_what_failed(few_probes: None) -> None:
    class Failing(LeavesPaddedRows):
        name, paged = "failing", False

        def supports(self, site, device):
            return ["it has no [sinks]"] if site.sinks else []

    found = check_attention(Failing, "cpu")
    assert not found.ok and [r.probe for r in found.failed] == ["padded rows are zeros"]
    text = str(found)
    assert text.startswith("failing on cpu, float32: 2 probes played, 1 failed")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert ["soft cap", "ok", ""] in rows
    assert ["sinks", "not supported", "it has no [sinks]"] in rows
    assert "padded row 100 holds 1" in found.failed[0].detail
    assert any(row[:2] == ["padded rows are zeros", "FAILED"] for row in rows)


def test_registering_runs_the_battery(few_probes: None) -> None:
    register_attention("sound", Unpaged)
    assert "sound" in attention.attention_names()
    assert type(attention.create_attention("sound", [SITE], torch.device("cpu"))) is Unpaged


def test_registering_a_backend_that_fails_names_the_probes(few_probes: None) -> None:
    with pytest.raises(ValueError, match=r"'bad' is not registered: on cpu it fails 2 of .*: padded rows are zeros: "):
        register_attention("bad", LeavesPaddedRows)
    assert "bad" not in attention.attention_names()


def test_registering_a_backend_that_cannot_be_checked_is_an_error() -> None:
    class Elsewhere(Unpaged):
        def supports(self, site, device):
            return [f"the device is {device.type}"]

    with pytest.raises(ValueError, match=r"'away' is not registered: it cannot be checked on cpu: the device is cpu"):
        register_attention("away", Elsewhere, "cpu")
    assert "away" not in attention.attention_names()


def test_registering_says_at_once_what_is_wrong_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "check_attention", lambda *args: pytest.fail("the battery ran"))
    with pytest.raises(ValueError, match="'reference' is taken"):
        register_attention("reference", Sound)
    with pytest.raises(ValueError, match="'auto' cannot name"):
        register_attention("auto", Sound)
    with pytest.raises(TypeError, match="not a subclass"):
        register_attention("odd", object)  # type: ignore[arg-type]
    assert attention._backends["reference"] is not Sound


def test_arguments_that_are_not_valid_are_errors_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"no attention backend is called 'flash'; valid are 'flash_attn', "):
        check_attention("flash")
    with pytest.raises(TypeError, match="neither the name of an attention backend nor its class"):
        check_attention(Sound())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype=torch\.int8 .* valid are torch\.float64"):
        check_attention(Sound, "cpu", torch.int8)
    with pytest.raises(ValueError, match="valid are cpu and cuda"):
        check_attention(Sound, "meta")
    with pytest.raises(ValueError, match="has no probe 'magic'; valid are 'empty slots', "):
        check_attention(Sound, "cpu", only=["magic"])


# -- the right answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_the_dense_answers_equal_the_oracle(feature: str) -> None:
    for changes in FEATURES[feature][0]:
        site = replace(SITE, **changes)
        random = [torch.randn(n, h, d, dtype=torch.float64) for n, h, d in (
            (5, site.heads, site.head_size), (9, site.kv_heads, site.head_size),
            (9, site.kv_heads, site.value_head_size))]  # fmt: skip
        sinks = torch.randn(site.heads, dtype=torch.float64) if site.sinks else None
        slopes = torch.rand(site.heads, dtype=torch.float64) if site.slopes else None
        want = attend_requests(
            *random, sinks, slopes,
            scale=site.scale, left=site.left, right=site.right, softcap=site.softcap, q_lens=[5], k_lens=[9],
        )  # fmt: skip
        torch.testing.assert_close(dense(site, Operands(*random, sinks, slopes)), want)
