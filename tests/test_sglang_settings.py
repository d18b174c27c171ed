"""The switch and the options of the SGLang plugin, without SGLang."""

from __future__ import annotations

import json
import sys
from dataclasses import fields

import pytest

from fullgraph_compile.integrations import sglang
from fullgraph_compile.integrations.sglang.settings import OPTIONS, SWITCH, BadSetting, Settings
from fullgraph_compile.options import Options


def read(switch: str | None, options: object = None) -> Settings:
    environment = {} if switch is None else {SWITCH: switch}
    if options is not None:
        environment[OPTIONS] = options if isinstance(options, str) else json.dumps(options)
    return Settings.read(environment)


@pytest.mark.parametrize("switch", [None, "", "0"])
def test_the_plugin_is_off_unless_asked_for(switch: str | None) -> None:
    assert not read(switch).on


def test_switch_and_options_are_read() -> None:
    assert read("1") == Settings(on=True)
    assert read("strict") == Settings(on=True, strict=True)
    assert read("1", {"strict": True}).strict
    given = read("1", {"compiler": "eager", "unsafe": "error", "plan": "sglang", "measured_routes": False})
    assert given == Settings(on=True, compiler="eager", unsafe="error", plan="sglang", measured_routes=False)
    assert given.compile_options.compiler == "eager" and given.compile_options.unsafe == "error"


def test_the_packages_own_switch_turns_the_plugin_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLGRAPH_COMPILE_DISABLE", "1")
    assert not read("strict").on


@pytest.mark.parametrize(
    ("switch", "options", "words"),
    [
        ("yes", None, "0, 1, strict"),
        ("1", "{compiler", "is not JSON"),
        ("1", "[1]", "must be a JSON object"),
        ("1", {"compilr": "eager"}, "did you mean 'compiler'? Valid options: strict, compiler, unsafe, plan"),
        ("1", {"compiler": "nvcc"}, '"inductor", "aot_eager", "eager"'),
        ("1", {"strict": 1}, "true, false"),
        ("1", {"measured_routes": "yes"}, "true, false"),
        ("1", {"fuse_projections": True}, "merged already"),
        ("1", {"buckets": [16]}, "--cuda-graph-bs-prefill"),
        ("1", {"request_slots": 16}, "full_prefill_max_req"),
        ("1", {"attention": "flashinfer"}, '"auto", "triton", "reference", "sglang"'),
        ("0", {"max_padding": 3}, "more than twofold"),
    ],
)
def test_a_bad_setting_says_what_is_valid(switch: str, options: object, words: str) -> None:
    with pytest.raises(BadSetting) as error:
        read(switch, options)
    assert words in str(error.value)


@pytest.mark.parametrize("option", [f.name for f in fields(Options)])
def test_each_option_of_the_package_is_taken_or_refused_with_a_reason(option: str) -> None:
    if option in ("strict", "compiler", "unsafe", "attention"):
        return
    with pytest.raises(BadSetting, match=r"is set by|means nothing here"):
        read("1", {option: 1})


def test_a_bad_setting_ends_sglang_which_would_only_log_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "on")
    with pytest.raises(SystemExit, match="0, 1, strict"):
        sglang.register()


def test_strict_ends_sglang_where_the_plugin_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "strict")
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(SystemExit, match="strict"):
        sglang.register()


def test_without_strict_sglang_goes_on_without_the_plugin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setitem(sys.modules, "sglang", None)
    sglang.register()
    assert "SGLang runs without the plugin" in caplog.text
