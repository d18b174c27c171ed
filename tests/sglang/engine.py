"""A real engine with its scheduler process: ``python -m tests.sglang.engine KIND``; plugins as the environment says."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.sglang.double import VARIABLE
from tests.sglang.one_model import BUCKETS, SLOTS, prompts, server_arguments
from tests.sglang.processes import tell

MORE = "SGLANG_ENGINE_MORE"
"""JSON: further arguments of the engine."""


def double_as_plugin() -> dict[str, str]:
    """Environment of a process that finds the doubles as a plugin of SGLang's."""
    folder = Path(tempfile.mkdtemp(prefix="sglang_double_"), "sglang_full_double-0.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-full-double\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[sglang.srt.plugins]\nfull_double = tests.sglang.double:register\n")
    return {"folder": str(folder.parent), VARIABLE: json.dumps({"buckets": BUCKETS, "slots": SLOTS})}


def main(kind: str) -> None:
    import sglang

    more = json.loads(os.environ.get(MORE, "{}"))
    engine = sglang.Engine(**server_arguments(kind, log_level="info", **more))
    greedy = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    long = prompts(40)[0]
    asked = [prompts(3), prompts(9, 1, 2, 13), [long], [[*long, *prompts(7)[0]]], prompts(1, 2, 1, 2, 1, 2, 1)]
    tokens, cached = [], []
    for ids in asked:
        answers = engine.generate(input_ids=ids, sampling_params=greedy)
        tokens.append([a["output_ids"] for a in answers])
        cached.append([a["meta_info"]["cached_tokens"] for a in answers])
    state: list[dict[str, Any]] = engine.get_server_info()["internal_states"]
    tell({"tokens": tokens, "cached": cached, "reports": state[0].get("fullgraph_compile")})


if __name__ == "__main__":
    os.environ.setdefault("SGLANG_BLOCK_NONZERO_RANK_CHILDREN", "0")
    main(sys.argv[1])
