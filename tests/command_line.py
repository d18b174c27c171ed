"""The command ``fgc``, run in this process."""

from __future__ import annotations

import re
from pathlib import Path
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


def described_fields() -> set[str]:
    """The fields of JSON files that docs/benchmarks.md describes."""
    text = (Path(__file__).parent.parent / "docs" / "benchmarks.md").read_text()
    section = text[text.index("## On your machine") : text.index("### Targets")]
    return {
        name for line in section.splitlines() if line[:3] == "| `" for name in re.findall("`(.*?)`", line.split("|")[1])
    }
