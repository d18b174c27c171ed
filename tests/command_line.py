"""The command ``fgc``, run in this process."""

from __future__ import annotations

from typing import Any

import pytest

from fullgraph_compile import cli


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, and what was said on stdout and stderr."""
    try:
        code: Any = cli.main(argv)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    return code, said.out, said.err
