"""Where the commands print."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


class Output(Console):
    """A console whose reader may leave, as ``head`` does: then the rest is not printed, and the command goes on.

    Args:
        stderr: whether it is stderr, not stdout.
        width: of what is no terminal.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        terminal = (sys.stderr if stderr else sys.stdout).isatty()
        super().__init__(
            stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=not terminal,
            width=None if terminal else width,
        )  # fmt: skip

    def print(self, *objects: Any, **options: Any) -> None:
        """As ``Console.print``, of a rich too that raises where a newer one calls ``on_broken_pipe``."""
        try:
            super().print(*objects, **options)
        except BrokenPipeError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Print no more."""
        self.quiet = True
        # What Python still holds of the text is written once more when the process ends.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self.file.fileno())
        os.close(devnull)
