"""What the plugin hooks into is there, and where it is not, it is named."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fullgraph_compile.integrations.sglang import release
from fullgraph_compile.integrations.sglang.plugin import Plugin
from fullgraph_compile.integrations.sglang.settings import Settings


def test_all_that_the_plugin_needs_is_there() -> None:
    assert release.missing_targets() == []
    found = release.installed()
    assert found.tested, f"SGLang {found.version} is not among {release.TESTED}"


def test_a_target_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = release.ROOT + "model_executor.runner_backend.utils.resolve_everything"
    monkeypatch.setitem(release._TARGETS, gone, ())
    with pytest.raises(release.UnknownRelease, match=r"is not supported: it has no .*resolve_everything"):
        release.installed()


def test_an_argument_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(release._TARGETS, release.RESOLVE, ("cuda_graph_runner", "everything"))
    with pytest.raises(release.UnknownRelease, match=r"resolve_prefill_backend \(argument everything\)"):
        release.installed()


def test_a_release_without_a_known_attention_call_is_refused_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    find = release.find
    hidden = ("_eager_attention", "_unified_attention_with_output_impl")
    monkeypatch.setattr(release, "find", lambda target: None if target.endswith(hidden) else find(target))
    with pytest.raises(release.UnknownRelease, match=r"SGLang 0\.5\.\d+ is not supported.*Tested: 0\.5\.17, 0\.5\.23"):
        release.installed()


def arguments(default: str, monkeypatch: pytest.MonkeyPatch, **given: Any) -> tuple[Any, Callable[..., Any]]:
    """Server arguments as far as the choice of the prefill backend goes, and SGLang's own code that resolves it."""
    parse = release.find(release.installed().parse)
    module = importlib.import_module(parse.__module__)
    config = module.default_cuda_graph_config

    def on_a_gpu() -> Any:
        made = config()
        made.prefill.backend = default
        return made

    monkeypatch.setattr(module, "default_cuda_graph_config", on_a_gpu)
    names = (
        "cuda_graph_config", "cuda_graph_backend_decode", "cuda_graph_backend_prefill", "cuda_graph_max_bs_decode",
        "cuda_graph_max_bs_prefill", "cuda_graph_max_seq_len_prefill", "cuda_graph_bs_decode",
        "cuda_graph_bs_prefill", "cuda_graph_prefill_max_context", "cuda_graph_tc_compiler",
    )  # fmt: skip
    switches = ("disable_cuda_graph", "disable_prefill_cuda_graph", "disable_decode_cuda_graph")
    return SimpleNamespace(**{**dict.fromkeys(names), **dict.fromkeys(switches, False), **given}), parse


@pytest.mark.parametrize(
    ("default", "given", "backend", "words"),
    [
        ("breakable", {}, "full", "prefill backend 'full' in place of 'breakable'"),
        ("disabled", {}, "disabled", ""),
        ("breakable", {"cuda_graph_backend_prefill": "full"}, "full", ""),
        ("breakable", {"cuda_graph_backend_prefill": "breakable"}, "breakable", "'breakable' was chosen"),
        ("breakable", {"disable_prefill_cuda_graph": True}, "disabled", "'disabled' was chosen"),
        ("breakable", {"cuda_graph_config": {"prefill": {"backend": "disabled"}}}, "disabled", "'disabled' was chosen"),
    ],
)
def test_full_is_taken_where_the_user_chose_nothing(
    default: str, given: dict[str, Any], backend: str, words: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    args, parse = arguments(default, monkeypatch, **given)
    plugin = Plugin(Settings(on=True), release.installed())
    with caplog.at_level(logging.INFO, logger="fullgraph_compile"):
        plugin.parse(parse, args)
    from fullgraph_compile.integrations.sglang.plugin import _resolved

    assert str(_resolved(args).backend) == backend
    assert (words in caplog.text) if words else not caplog.text
    locked = {(str(phase), key) for phase, key in args._cuda_graph_config_locked}
    # SGLang may still turn off what the user did not choose.
    assert (("prefill", "backend") in locked) == bool(given)
