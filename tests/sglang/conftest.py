"""These tests run the real SGLang, in an environment of their own: ``make test-sglang``."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]
