"""SGLang's state is global, so each model gets a process of its own, which says in JSON what it saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"
_MARK = "FACTS "


def environment(switch: str, options: dict[str, Any] | None = None, **more: str) -> dict[str, str]:
    """The environment of a process with the plugin's switch set."""
    paths = [str(ROOT), str(STAND_INS), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "FULLGRAPH_COMPILE_SGLANG": switch, "FULLGRAPH_COMPILE_SGLANG_OPTIONS": json.dumps(options or {}), **more,
    }  # fmt: skip


def facts_of(module: str, *arguments: str, env: dict[str, str], timeout: float = 240) -> dict[str, Any]:
    """Run ``python -m module arguments`` and read what it tells; its log is under "log"."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    told = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    assert told, f"{module} {' '.join(arguments)} told nothing, exit {done.returncode}:\n{done.stderr[-4000:]}"
    return {**json.loads(told[-1][len(_MARK) :]), "log": done.stderr, "exit": done.returncode}


def tell(facts: dict[str, Any]) -> None:
    """Print the facts, as the last thing that the process does: SGLang's threads would keep it alive."""
    print(_MARK + json.dumps(facts), flush=True)
    sys.stderr.flush()
    os._exit(0)
