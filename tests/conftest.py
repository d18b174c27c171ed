"""Every test starts with a clean Dynamo and a small heap; GPU tests are skipped where there is no GPU."""

from __future__ import annotations

import gc
import logging
import os
import sys

# Set before torch loads: tests run side by side on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# Structured traces of the compiler, for tools: pytest would format and keep every one of them.
logging.getLogger("torch.__trace").disabled = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


_imported = 0


@pytest.fixture(autouse=True)
def small_heap() -> None:
    """Every capture collects garbage, and would go through all that was ever imported: a third of the suite's time.
    So what is there after an import is not looked at again."""
    global _imported
    if len(sys.modules) > _imported:
        _imported = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def clean_dynamo() -> None:
    torch._dynamo.reset()
    # A traced graph that sets the grad mode leaves it as the trace had it, for all tests after it in this process.
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
