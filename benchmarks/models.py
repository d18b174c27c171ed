"""Every text architecture of transformers, tiny and with random weights, through ``fullgraph_compile.compile``.

    python benchmarks/models.py                      # all of architectures.txt, going on where the last run stopped
    python benchmarks/models.py --only llama,bloom --fresh
    python benchmarks/models.py --stale              # again what an earlier state of the code gave
    python benchmarks/models.py --write-list         # make architectures.txt from the installed transformers

Each architecture runs in a process of its own with a limit of processor time. Writes docs/models.md, and exits with 1
where a compiled model gave anything else than eager.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import hashlib
import inspect
import json
import multiprocessing
import platform
import resource
import signal
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.transformers_models import architectures as arch  # noqa: E402

LIST = ROOT / "benchmarks" / "architectures.txt"
PAGE = ROOT / "docs" / "models.md"
CACHE = ROOT / "build" / "models.json"
COMMAND = "make models"
# A recipe that fits a config badly may ask for a model of its full size.
MEMORY_BYTES = 12 * 2**30
NAMES = {"causal": "causal LM", "masked": "masked LM", "base": "base text model"}
ORDER = (arch.UNEQUAL, arch.REPLAYS, arch.REFUSED, arch.NOT_TRACED, arch.NOT_BUILT, arch.STOPPED)
# What reads something else than text, in the signature of a model that reads text as well.
_NOT_TEXT = ("pixel", "image", "audio", "input_features", "input_values", "bbox")

Key = tuple[str, str]


def architectures() -> list[Key]:
    """Mapping and name of each line of architectures.txt."""
    lines = (line.split("#")[0].split() for line in LIST.read_text().splitlines())
    return [(words[0], words[1]) for words in lines if words]


def write_list() -> None:
    """architectures.txt from transformers' mappings; of the base models those that read only text."""
    import transformers
    from transformers.models.auto import modeling_auto

    lines = [f"# Mapping and name, from transformers {transformers.__version__} by: benchmarks/models.py --write-list"]
    for mapping, attribute in arch.MAPPINGS.items():
        for name, classes in sorted(getattr(modeling_auto, attribute).items()):
            if mapping != "base" or _reads_text(classes if isinstance(classes, str) else classes[0]):
                lines.append(f"{mapping} {name}")
    LIST.write_text("\n".join(lines) + "\n")


def _reads_text(class_name: str) -> bool:
    import transformers

    try:
        kind = getattr(transformers, class_name)
        names = list(inspect.signature(kind.forward).parameters)
    except (AttributeError, ImportError):
        return False
    other = any(part in name for name in names for part in _NOT_TEXT)
    return kind.main_input_name == "input_ids" and "input_ids" in names and not other


def _code() -> str:
    """Of the code that a result comes from: the package but for what knows SGLang, the models' recipes and calls."""
    digest = hashlib.sha256()
    recipes = ("architectures.py", "calls.py", "random_weights.py", "tiny_configs.py")
    own = [ROOT / "tests" / "transformers_models" / name for name in recipes]
    found = {*ROOT.glob("fullgraph_compile/**/*.py"), *ROOT.glob("passes/*.py"), *own}
    # An editable tree may hold the passes a second time, by a link.
    ours = {p for p in found if "sglang" not in p.parts and p.parent != ROOT / "fullgraph_compile" / "passes"}
    for path in sorted(ours):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


CODE = _code()


def _work(pipe: Connection, key: Key, limit: float) -> None:
    """In a process of its own: one architecture, its result through the pipe."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    pipe.send(arch.measure(*key).as_dict())
    pipe.close()
    # Nothing of the parent's is to be torn down here.
    os._exit(0)


def run(keys: list[Key], jobs: int, limit: float, results: dict[Key, dict[str, Any]], until: float) -> None:
    """Fill ``results``, ``jobs`` at a time, keeping them on disk; starts none after ``until``."""
    # Ended from outside too, no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # Imported once here, so that each forked process starts with them.
    import torch._dynamo
    import transformers.modeling_utils  # noqa: F401

    import fullgraph_compile  # noqa: F401

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    todo, running = list(keys), {}
    try:
        while todo or running:
            while todo and len(running) < jobs and time.monotonic() < until:
                key = todo.pop(0)
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(theirs, key, limit), daemon=True)
                process.start()
                theirs.close()
                running[mine] = (key, process, time.monotonic())
            if not running:
                return
            ready = wait(list(running), timeout=1.0)
            for pipe, (key, process, start) in list(running.items()):
                seconds = time.monotonic() - start
                if pipe in ready:
                    result = _received(pipe, key, process, limit)
                elif seconds > _WAITS * limit:
                    process.kill()
                    result = _stopped(key, f"more than {_WAITS * limit:.0f} s")
                else:
                    continue
                process.join()
                del running[pipe]
                results[key] = {**result, "code": CODE}
                _save(results)
                print(
                    f"{len(results):4d}  {'/'.join(key):36s} {result['status']:10s} {result['reason'][:110]}",
                    flush=True,
                )
    finally:
        for _, process, _ in running.values():
            process.kill()


# Of processes that share the processor, or wait for something, so many times the limit.
_WAITS = 20


def _received(pipe: Any, key: Key, process: Any, limit: float) -> dict[str, Any]:
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        if process.exitcode == -signal.SIGXCPU:
            return _stopped(key, f"more than {limit:.0f} s of processor time")
        return _stopped(key, f"the process ended with code {process.exitcode}")


def _stopped(key: Key, reason: str) -> dict[str, Any]:
    return arch.Result(*key, status=arch.STOPPED, reason=reason).as_dict()


def _save(results: dict[Key, dict[str, Any]]) -> None:
    CACHE.parent.mkdir(exist_ok=True)
    new = CACHE.with_suffix(".new")
    new.write_text(json.dumps({"versions": versions(), "results": list(results.values())}, indent=1))
    new.replace(CACHE)


def _saved() -> dict[Key, dict[str, Any]]:
    """Results of an earlier run with the same versions."""
    if not CACHE.exists():
        return {}
    kept = json.loads(CACHE.read_text())
    if kept["versions"] != versions():
        return {}
    return {(r["mapping"], r["name"]): r for r in kept["results"]}


def versions() -> dict[str, str]:
    from importlib.metadata import version

    found = {name: version(name) for name in ("torch", "transformers", "fullgraph-compile")}
    return {"Python": platform.python_version(), **found}


def counts(results: dict[Key, dict[str, Any]], listed: list[Key]) -> list[list[str]]:
    """Rows of the table of counts: mapping, listed, one column for each status, not run."""
    rows = []
    for mapping, title in NAMES.items():
        keys = [k for k in listed if k[0] == mapping]
        found = Counter(results[k]["status"] for k in keys if k in results)
        missing = len(keys) - found.total()
        rows.append([title, str(len(keys)), *(str(found[status]) for status in ORDER), str(missing)])
    return rows


def page(results: dict[Key, dict[str, Any]], listed: list[Key]) -> str:
    """docs/models.md."""
    head = ["mapping", "names", *("not equal" if s == arch.UNEQUAL else s for s in ORDER), "not run"]
    made = ", ".join(f"{name} {v}" for name, v in versions().items())
    lines = [
        "# Architectures of transformers",
        "",
        f"Generated by `{COMMAND}`; do not edit. Measured on a CPU ({platform.machine()}, {os.cpu_count()} cores) with "
        f"{made}.",
        "",
        *_table(head, counts(results, listed)),
        "",
        "Each name of `benchmarks/architectures.txt` is built with random weights and two layers, or one of each kind "
        "of layer, and compiled by `fgc.compile(model, "
        + ", ".join(f"{k}={v!r}" for k, v in arch.OPTIONS.items())
        + f")`. It gets {len(arch.CALLS)} calls: packed, dense, padded on the right and on the left, of 1 to 20 "
        "tokens and 1 to 4 requests, without a KV cache. "
        "Each result is compared with an uncompiled copy's, "
        f"packed ones with one call per request; equal is within {arch.TOLERANCE:g} of the largest "
        "output, at every real token.",
        "",
        "- *replays*: equal, and at least 95% of the eligible calls launch a graph. All calls are eligible but "
        "left-padded ones of a model to whose real tokens padding on the left means something.",
        "- *refused*: equal, as the model itself or at exact sizes; the reason is what `fgc.report` says.",
        "- *does not trace*: equal, as the model itself; Dynamo does not get one graph.",
        "- *cannot be built tiny*: the generic recipe gives no model that runs; the exception is its own.",
        "",
        f"Experts of MoE models run by transformers' `{arch.EXPERTS}`: in fp32 the default, `grouped_mm`, reads counts "
        "on the host where it is traced, and is refused at capture.",
        "",
        "A graph here is a recorded tape of the same calls, replayed without the Python code: what a CUDA graph may "
        "capture beyond it, such as kernels that only a GPU has, is not measured here.",
    ]
    if old := sum(r.get("code") != CODE for r in results.values()):
        lines += ["", f"{old} of the {len(results)} results are of an earlier state of the code."]
    for status in ORDER:
        rows = [results[k] for k in listed if k in results and results[k]["status"] == status]
        if not rows:
            continue
        lines += ["", f"## {status[0].upper()}{status[1:]} ({len(rows)})", ""]
        if status == arch.REPLAYS:
            columns = ["replays", "largest difference", "note"]
            cells = [[f"{r['replays']} of {r['eligible']}", f"{r['error']:.0e}", r["note"]] for r in rows]
        else:
            columns, cells = ["reason"], [[r["reason"]] for r in rows]
        named = [[r["name"], NAMES[r["mapping"]], r["model"], *more] for r, more in zip(rows, cells, strict=True)]
        lines += _table(["name", "mapping", "class", *columns], named)
    missing = [k for k in listed if k not in results]
    if missing:
        lines += ["", f"## Not run ({len(missing)})", ""]
        for mapping, title in NAMES.items():
            names = [name for m, name in missing if m == mapping]
            if names:
                lines += [f"{title}: {', '.join(names)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *escaped)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAMES", help="names, with commas between them")
    parser.add_argument("--mapping", choices=list(NAMES), help="only the names of this mapping")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="processor time of each")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS", help="start none later")
    parser.add_argument("--fresh", action="store_true", help="run again what an earlier run has the result of")
    parser.add_argument("--stale", action="store_true", help="run again what other code than this gave")
    parser.add_argument("--again", default="", metavar="STATUS", help="run again what had this status")
    parser.add_argument("--write-list", action="store_true", help="make architectures.txt anew, and stop")
    args = parser.parse_args()
    if args.write_list:
        write_list()
        return 0
    listed, results = architectures(), _saved()
    only = {name for name in args.only.split(",") if name}
    keys = [k for k in listed if (not only or k[1] in only) and args.mapping in (None, k[0])]
    if only - {name for _, name in keys}:
        parser.error(f"not in {LIST.name}: {', '.join(sorted(only - {name for _, name in keys}))}")

    def due(had: dict[str, Any]) -> bool:
        again = args.again and had["status"].startswith(args.again)
        return args.fresh or again or (args.stale and had.get("code") != CODE)

    # What is run again keeps its old result until there is a new one.
    run(
        [k for k in keys if k not in results or due(results[k])],
        args.jobs,
        args.limit,
        results,
        time.monotonic() + args.stop_after,
    )

    listed_results = {k: results[k] for k in listed if k in results}
    wrong = [r for r in listed_results.values() if r["status"] == arch.UNEQUAL]
    for r in wrong:
        print(f"NOT EQUAL: {r['mapping']}/{r['name']} ({r['model']}): {r['reason']}")
    PAGE.write_text(page(listed_results, listed))
    for row in counts(listed_results, listed):
        said = ", ".join(f"{n} {what}" for n, what in zip(row[2:], [*ORDER, "not run"], strict=True) if n != "0")
        print(f"{row[0]}: {row[1]} names: {said}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
