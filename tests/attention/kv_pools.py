"""Pages of K and V between guard slots, and a write into them whose every byte is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullgraph_compile.attention.kv_write import write_kv

NAN = float("nan")


@dataclass
class Pools:
    """K and V pages between guard slots, all filled with 7."""

    whole: tuple[Tensor, Tensor]
    page_size: int

    @classmethod
    def of(
        cls,
        pages: int,
        page_size: int,
        heads: int = 2,
        size: int = 8,
        value_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Pools:
        shapes = ((pages + 2, page_size, heads, s) for s in (size, size if value_size is None else value_size))
        k, v = (torch.full(shape, 7.0, dtype=dtype, device=device) for shape in shapes)
        return cls((k, v), page_size)

    @property
    def k(self) -> Tensor:
        return self.whole[0][1:-1]

    @property
    def v(self) -> Tensor:
        return self.whole[1][1:-1]

    def rows(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Random new rows, ``[count, heads, size]``."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(  # type: ignore[return-value]
            torch.randn(count, *t.shape[2:], generator=generator).to(t) for t in (self.k, self.v)
        )

    def expect(self, k: Tensor, v: Tensor, slots: list[int]) -> tuple[Tensor, Tensor]:
        """What a plain loop leaves in all of the memory."""
        wanted = tuple(t.clone() for t in self.whole)
        for whole, new in zip(wanted, (k, v), strict=True):
            for row, slot in enumerate(slots):
                whole[1 + slot // self.page_size, slot % self.page_size] = new[row]
        return wanted  # type: ignore[return-value]

    def check(self, wanted: tuple[Tensor, Tensor]) -> None:
        """Every byte outside of reserved page 0 is as wanted; page 0 holds 7 as before, or zeros, and never NaN."""
        for got, want in zip(self.whole, wanted, strict=True):
            reserved = got[1].clone()
            assert ((reserved == 7) | (reserved == 0)).all()
            assert (reserved[1:] == 7).all()  # only slot 0 takes padded rows
            assert torch.equal(torch.cat([got[:1], got[2:]]), torch.cat([want[:1], want[2:]]))


def ids(values: list[int], device: str = "cpu", dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def total(n: int, device: str = "cpu") -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device=device)


def check_write(
    pools: Pools, k: Tensor, v: Tensor, slots: list[int], *, tail: list[int] | None = None, ids_dtype: Any = torch.int64
) -> None:
    """Write ``len(slots)`` real rows; the slot ids of the padded rows are ``tail``, by default 0."""
    tail = [0] * (k.shape[0] - len(slots)) if tail is None else tail
    wanted = pools.expect(k, v, slots)
    device = str(k.device)
    write_kv(k, v, pools.k, pools.v, ids([*slots, *tail], device, ids_dtype), total(len(slots), device))
    pools.check(wanted)
