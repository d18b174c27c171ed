"""Writing K and V into the pages: what does not fit together is refused, and no gradient graph gets the cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fullgraph_compile.attention.kv_write import write_kv
from tests.attention.kv_pools import Pools, check_write, ids, total


def test_the_cache_never_enters_a_gradient_graph() -> None:
    pools = Pools.of(5, 4)
    k, v = pools.rows(3)
    check_write(pools, k.requires_grad_(), v.requires_grad_(), [4, 9, 6])
    assert not pools.k.requires_grad and pools.k.grad_fn is None


@pytest.mark.parametrize(
    "change, text",
    [
        ({"k": torch.zeros(3, 2, 9)}, r"k is \[3, 2, 9\], k_pages holds 2 heads of 8; give the cache the geometry"),
        ({"v": torch.zeros(3, 1, 8)}, r"v is \[3, 1, 8\], v_pages holds 2 heads of 8"),
        ({"v": torch.zeros(4, 2, 8)}, r"K and V differ in more than head size: k is \[3, 2, 8\], v \[4, 2, 8\]"),
        ({"k": torch.zeros(3, 2, 8).half()}, r"k is torch\.float16 on cpu, k_pages is torch\.float32 on cpu"),
        ({"k": torch.zeros(3, 2, 8, device="meta")}, r"k is torch\.float32 on meta, k_pages is torch\.float32 on cpu"),
        ({"v_pages": torch.zeros(5, 8, 8)}, r"v_pages is \[5, 8, 8\]; it must be \[pages, page_size, kv_heads, head"),
        ({"v_pages": torch.zeros(5, 3, 2, 8)}, r"K and V differ .* v_pages \[5, 3, 2, 8\]"),
        ({"k_pages": torch.zeros(5, 2, 4, 8).transpose(1, 2)}, r"k_pages has strides .* its pages must lie one after"),
        ({"k_pages": torch.zeros(5, 4, 2, 16)[..., ::2]}, r"k_pages has strides .* its last dim must be contiguous"),
        ({"slot_ids": torch.zeros(3)}, r"slot_ids is \[3\] of torch\.float32; it must be \[tokens\] of int64 or int32"),
        ({"slot_ids": torch.zeros(3, 1).long()}, r"slot_ids is \[3, 1\] of torch\.int64"),
        ({"num_real_tokens": torch.zeros(2)}, r"num_real_tokens is \[2\]; it must be one number"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Tensor], text: str) -> None:
    pools = Pools.of(5, 4)
    k, v = pools.rows(3)
    call = {"k": k, "v": v, "k_pages": pools.k, "v_pages": pools.v, "slot_ids": ids([4, 5, 6])}
    with pytest.raises(ValueError, match=text):
        write_kv(**{**call, "num_real_tokens": total(3), **change})
    assert all((t == 7).all() for t in pools.whole)
