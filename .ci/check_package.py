"""Check the package as a user gets it: a wheel, and the editable install, each from outside the tree.

``fullgraph_compile.passes`` lies in another folder of the repository than ``fullgraph_compile``, so a mistake in the
mapping shows only where the repository is not on the path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# argv: the folder that the package must come from. A wheel that is not installed in the environment but on the path
# must be complete without it, so the finder that the editable install put in place is taken out for it.
PROBE = """
import sys
from importlib.metadata import distributions, entry_points
from pathlib import Path

root, passes, installed = (Path(p).resolve() for p in sys.argv[1:4])
if installed != Path("/"):
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
    found = [d for d in distributions(path=[str(installed)]) if d.metadata["Name"] == "fullgraph-compile"]
    assert len(found) == 1, found
    backends = found[0].entry_points
else:
    backends = entry_points(group="torch_dynamo_backends")
assert [b.value for b in backends if b.name == "full_prefill"] == ["fullgraph_compile.backend:full_prefill"], backends

import torch

assert "full_prefill" in torch._dynamo.list_backends(exclude_tags=()), "torch.compile does not list the backend"

import fullgraph_compile
import fullgraph_compile.passes

for module, folder in ((fullgraph_compile, root), (fullgraph_compile.passes, passes)):
    assert Path(module.__file__).resolve().parent == folder, f"{module.__name__} is {module.__file__}, not in {folder}"
assert (root / "py.typed").exists(), "py.typed is missing"
"""


def probe(name: str, root: Path, passes: Path, installed: Path | None = None) -> None:
    """Import the package in a fresh interpreter that does not stand in the repository."""
    path = {"PYTHONPATH": str(installed)} if installed else {}
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | path
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [sys.executable, "-c", PROBE, str(root), str(passes), str(installed or "/")]
        subprocess.run(command, cwd=elsewhere, env=env, check=True)
    print(f"{name}: fullgraph_compile and fullgraph_compile.passes import, torch.compile lists full_prefill")


def main() -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    probe("editable install", ROOT / "fullgraph_compile", ROOT / "passes")
    with tempfile.TemporaryDirectory() as folder:
        wheels, target = Path(folder, "wheels"), Path(folder, "target")
        # A build folder that an earlier build left would bring its files into this wheel.
        shutil.rmtree(ROOT / "build", ignore_errors=True)
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(ROOT)], check=True)
        shutil.rmtree(ROOT / "build", ignore_errors=True)
        (wheel,) = wheels.glob("*.whl")
        subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
        missing = [
            source.relative_to(ROOT)
            for folder in ("fullgraph_compile", "passes")
            for source in (ROOT / folder).rglob("*.py")
            if not (
                target / "fullgraph_compile" / source.relative_to(ROOT / "fullgraph_compile")
                if folder == "fullgraph_compile"
                else target / "fullgraph_compile" / source.relative_to(ROOT)
            ).exists()
        ]
        assert not missing, f"{wheel.name} lacks {', '.join(map(str, missing))}"
        probe(f"wheel {wheel.name}", target / "fullgraph_compile", target / "fullgraph_compile" / "passes", target)


if __name__ == "__main__":
    main()
