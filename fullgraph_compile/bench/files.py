"""Files that a command writes: refused before anything is measured, written after all was printed."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fullgraph_compile.bench.output import Output


def check_files(parser: argparse.ArgumentParser, files: Sequence[tuple[str, str | None]]) -> None:
    """End the command where a file cannot be written, or is given twice.

    Args:
        files: (option, path); None = the option was not given.  Folders that do not exist are made.
    """
    taken: dict[str, str] = {}
    for option, path in files:
        if path is None:
            continue
        place = os.path.realpath(path)
        if place in taken:
            parser.error(f"{option} {path} is the file of {taken[place]}; each must have a file of its own")
        taken[place] = option
        if why := _wrong(path):
            parser.error(f"{option} {path}: {why}; valid is the path of a file that can be written")


def _wrong(path: str) -> str:
    """Why a file cannot be written; empty = it can.  A file that was not there is not there after."""
    new = not os.path.exists(path)
    if not new and not os.path.isfile(path):
        return "it is a folder or a device"
    try:
        _make_folder(path)
        # Permissions do not say it all: a folder of /proc takes no files.
        with open(path, "ab"):
            pass
        if new:
            os.remove(path)
    except OSError as error:
        return str(error)
    return ""


def _make_folder(path: str) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)


def write_files(prog: str, files: Sequence[tuple[str, str | None, Callable[[str], None]]], aside: Output) -> bool:
    """Write files, each whether or not another failed.

    Args:
        prog: the command.
        files: (option, path, what writes it there); None = the option was not given.
        aside: told what failed.

    Returns:
        Whether all were written.
    """
    written = True
    for option, path, write in files:
        if path is None:
            continue
        try:
            _make_folder(path)
            write(path)
        except Exception as error:
            aside.print(f"{prog}: {option} {path} was not written: {error}")
            written = False
    return written


def write_json(path: str, content: Any) -> None:
    """Write what JSON can hold."""
    Path(path).write_text(json.dumps(content, indent=1) + "\n")
