"""Arguments of another kind than the one that is taken: the error names the argument and what is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fullgraph_compile as fgc
from fullgraph_compile.commands import read_lengths


@pytest.mark.parametrize("cache", ["x", torch.zeros(3), 7])
def test_a_cache_that_is_none_is_refused_by_its_type(cache: Any) -> None:
    with pytest.raises(TypeError, match=f"cache is a {type(cache).__name__}, not a PagedKVCache"):
        fgc.PrefillBatch([5], cache=cache, pages=[[1]])


@pytest.mark.parametrize("pages", [3, "1", None, iter([1])])
def test_pages_that_are_no_list_are_refused_before_any_is_freed(pages: Any) -> None:
    cache = fgc.PagedKVCache([(2, 8, 8)], pages=4, page_size=4, dtype=torch.float32, device="cpu")
    held = cache.allocate(4)
    for call in (cache.free, lambda x: cache.append(x, 0, 1), lambda x: cache.share(x, 1)):
        with pytest.raises(TypeError, match="must be a list of page ids"):
            call(pages)
    assert cache.free_pages == 2
    cache.free(held)
    assert cache.free_pages == 3


@pytest.mark.parametrize("text", ["abc", "{", "30\n7.5\n", '{"thirty": 1}'])
def test_a_file_of_lengths_that_cannot_be_read_is_named_with_what_is_valid(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"--lengths .*lengths\.txt: .*one count a line"):
        read_lengths(str(path))


@pytest.mark.parametrize("act", [fgc.release, fgc.close, fgc.warmup, fgc.explain, fgc.decision])
def test_none_is_no_body_where_something_is_done_to_one(act: Any) -> None:
    with pytest.raises(TypeError, match="None is not a compiled module"):
        act(None)


@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 32), (1, 5, 4, 8)])
def test_explain_gives_the_reason_for_a_batch_dim_in_a_plain_torch_compile(shape: tuple[int, ...]) -> None:
    body = torch.compile(torch.nn.Linear(8, 8).requires_grad_(False), backend="full_prefill")
    call = torch.zeros(shape, dtype=torch.float32 if len(shape) > 2 else torch.int64)
    assert fgc.decision(body, call).reason is fgc.Reason.BATCHED
    assert "a batch dim above 1" in fgc.explain(body, call)
