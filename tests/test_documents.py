"""The user's documents name all that they promise to."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import fullgraph_compile as fgc

DOCS = Path(__file__).parent.parent / "docs"


def first_cells(document: str) -> str:
    """The first cell of each row of a document's tables, one a line."""
    return "\n".join(
        line.split("|")[1].strip() for line in (DOCS / document).read_text().splitlines() if line[:1] == "|"
    )


def test_limits_explain_every_reason_that_a_report_can_give() -> None:
    explained = first_cells("limits.md")
    # What a reason says in brackets is the table's to say in its own words.
    missing = [r.name for r in fgc.Reason if re.sub(r" \(.*\)$", "", r.value) not in explained]
    assert not missing


def test_every_option_is_described_with_its_default() -> None:
    rows = dict(line.split("|")[1:3] for line in (DOCS / "options.md").read_text().splitlines() if line[:3] == "| `")
    described = {name.strip(" `"): default.strip(" `") for name, default in rows.items()}
    options = {f.name: f.default for f in dataclasses.fields(fgc.Options)}
    assert described == {
        name: str(default).join('""' if isinstance(default, str) else ("", "")) for name, default in options.items()
    }
