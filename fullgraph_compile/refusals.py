"""What could not be served, and when it is worth another try: the module may have changed since."""

from __future__ import annotations

from dataclasses import dataclass

from fullgraph_compile.integrations.plain import NotServed


@dataclass
class Refusal:
    """Of one module, or of one form of call: why, and for how many calls that is not asked again.

    To ask takes calls of our own, or a trace, which takes seconds.  So of the calls after the first refusal the 1st,
    the 3rd, the 7th ... ask again.
    """

    refused: NotServed
    times: int = 1
    wait: int = 0

    def again(self, refused: NotServed) -> None:
        """It was asked, and refused."""
        self.refused = refused
        self.wait = 2**self.times - 1
        self.times += 1

    def check(self) -> None:
        """Count a call, and raise ``NotServed`` if it is not time to ask again."""
        if self.wait:
            self.wait -= 1
            raise self.refused


class Refusals:
    """Refusals by what was refused."""

    def __init__(self) -> None:
        self._of: dict[object, Refusal] = {}

    def check(self, what: object, *, ask: bool = True) -> None:
        """Raise ``NotServed`` if it was refused, and it is not time to ask again, or ``ask`` is False."""
        refusal = self._of.get(what) if self._of else None
        if refusal is not None:
            if not ask:
                raise refusal.refused
            refusal.check()

    def add(self, what: object, refused: NotServed) -> None:
        """It was asked, and refused."""
        if what in self._of:
            self._of[what].again(refused)
        else:
            self._of[what] = Refusal(refused)

    def drop(self, what: object) -> None:
        """It was asked, and served."""
        self._of.pop(what, None)

    def clear(self) -> None:
        """Ask all again."""
        self._of.clear()
