"""These tests run the real SGLang, in an environment of their own: ``make test-sglang``."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]


def _serve(switch: str, options: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    from tests.sglang.engine import MORE, double_as_plugin
    from tests.sglang.processes import environment, facts_of

    double = double_as_plugin()
    variables = {k: v for k, v in double.items() if k != "folder"}
    env = environment(switch, options, **{MORE: json.dumps(more), **variables})
    env["PYTHONPATH"] += os.pathsep + double["folder"]
    return facts_of("tests.sglang.engine", "qwen3", env=env)


@pytest.fixture(scope="session")
def serve_engine() -> Any:
    """What a real engine tells: its switch, the plugin's options, further arguments of the engine."""
    return _serve


@pytest.fixture(scope="session")
def plain() -> dict[str, Any]:
    """An engine without the plugin."""
    return _serve("0")
