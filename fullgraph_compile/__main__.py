"""``python -m fullgraph_compile`` is ``fgc``."""

from __future__ import annotations

import sys

from fullgraph_compile.cli import main

if __name__ == "__main__":
    sys.exit(main())
