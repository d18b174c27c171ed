"""For every line of the op table a tiny function that uses the op row by row.

``x`` is [tokens, 8] float, ``ids`` [tokens] int64 in 0..7; weights are uniform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (defines an op)
from torch import Tensor

import fullgraph_compile.ops as ops

Case = Callable[[Tensor, Tensor], Any]

_g = torch.Generator().manual_seed(0)
W = torch.nn.Parameter(torch.randn(8, 8, generator=_g), requires_grad=False)
B = torch.nn.Parameter(torch.randn(8, generator=_g), requires_grad=False)
KERNEL = torch.nn.Parameter(torch.randn(8, 1, 3, generator=_g), requires_grad=False)
EXPERTS = torch.nn.Parameter(torch.randn(8, 8, 8, generator=_g), requires_grad=False)


def grouped(product: Callable[..., Tensor]) -> Case:
    """One expert a row, by sorting the rows, the way transformers does it."""

    def case(x: Tensor, ids: Tensor) -> Tensor:
        keys, perm = torch.sort(ids)
        counts = torch.histc(keys.float(), bins=8, min=0, max=7)
        out = product(x[perm], EXPERTS, torch.cumsum(counts, dim=0, dtype=torch.int32))
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0))
        return out[inverse]

    return case


def fallback(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:

    return torch.ops.transformers.grouped_mm_fallback(x, weight, offs=offs)


def with_setitem(x: Tensor, ids: Tensor) -> Tensor:
    y = x.clone()
    y[:, 2:4] = x[:, :2]
    y[..., 0] = 1.0
    return y


def with_context(context: Callable[[], Any]) -> Case:
    def case(x: Tensor, ids: Tensor) -> Tensor:
        with context():
            return x * 2

    return case


def logged(x: Tensor, ids: Tensor) -> Tensor:
    torch._C._log_api_usage_once("test")
    return x * 2


def sized(x: Tensor, ids: Tensor) -> Tensor:
    before = x.size()
    return (x.reshape(-1, x.size(-1)) * 2).view(before)


def unary(name: str, positive: bool = False) -> Case:
    fn = getattr(torch, name)
    return (lambda x, ids: fn(x.abs() + 1)) if positive else (lambda x, ids: fn(x))


def over_features(name: str) -> Case:
    fn = getattr(torch, name)
    return lambda x, ids: fn(x, dim=1)


def binary(name: str) -> Case:
    fn = getattr(torch, name)
    return lambda x, ids: fn(x, x.cos())


CASES: dict[str, Case] = {
    "full_prefill::attention": lambda x, ids: ops.attention(
        x.view(-1, 2, 4), x.view(-1, 2, 4), x.view(-1, 2, 4), None, None, 1.0, -1, 0, 0.0, -1
    ),
    "full_prefill::hosted_attention": lambda x, ids: ops.hosted_attention(x, x.view(-1, 2, 4), None, [x, B], "", 8, 0),
    **{n: binary(n) for n in ("rsub", "multiply", "fmod", "remainder", "atan2", "maximum", "minimum")},
    **{n: binary(n) for n in ("eq", "ne", "lt", "le", "gt", "ge", "greater", "logical_and", "logical_or")},
    **{n: binary(n) for n in ("logical_xor", "complex")},
    **{n: unary(n, positive=True) for n in ("sqrt", "rsqrt", "reciprocal", "log", "log2", "log1p")},
    **{n: unary(n) for n in ("abs", "sign", "square", "exp", "exp2", "expm1", "sin", "cos", "tan", "floor", "ceil")},
    **{n: unary(n) for n in ("round", "trunc", "erf", "nan_to_num", "logical_not", "isnan", "isinf", "isfinite")},
    **{n: unary(n) for n in ("tanh", "sigmoid", "clone", "detach", "atan", "sinh", "cosh", "asinh", "erfc")},
    "erfinv": lambda x, ids: torch.erfinv(x.sin()),
    "add": lambda x, ids: x + B,
    "sub": lambda x, ids: x - x.sin(),
    "mul": lambda x, ids: 2.0 * x,
    "truediv": lambda x, ids: x / 3,
    "div": lambda x, ids: torch.div(x, x.exp()),
    "floordiv": lambda x, ids: ids // 2,
    "floor_divide": lambda x, ids: torch.floor_divide(ids, 3),
    "mod": lambda x, ids: ids % 3,
    "pow": lambda x, ids: x**2,
    "neg": lambda x, ids: -x,
    "pos": lambda x, ids: +x,
    "lerp": lambda x, ids: torch.lerp(x, x.sin(), 0.3),
    "addcmul": lambda x, ids: torch.addcmul(x, x, x.sin()),
    "addcdiv": lambda x, ids: torch.addcdiv(x, x, x.exp()),
    "clamp": lambda x, ids: x.clone().clamp_(max=0.5),
    "clip": lambda x, ids: x.clip(-1, 1),
    "clamp_min": lambda x, ids: torch.clamp_min(x, 0.0),
    "clamp_max": lambda x, ids: torch.clamp_max(x, 0.0),
    "and": lambda x, ids: (x > 0) & (x < 1),
    "or": lambda x, ids: (x > 0) | (x < -1),
    "xor": lambda x, ids: (x > 0) ^ (x < 1),
    "invert": lambda x, ids: ~(x > 0),
    "bitwise_and": lambda x, ids: torch.bitwise_and(ids, 3),
    "bitwise_or": lambda x, ids: torch.bitwise_or(ids, 3),
    "bitwise_not": lambda x, ids: torch.bitwise_not(ids),
    "where": lambda x, ids: torch.where(x > 0, x, B),
    "masked_fill": lambda x, ids: x.masked_fill(x > 0, 0.0),
    "copy": lambda x, ids: torch.zeros_like(x).copy_(x),
    "fill": lambda x, ids: torch.empty_like(x).fill_(2.0),
    "zero": lambda x, ids: torch.empty_like(x).zero_() + x,
    "relu": lambda x, ids: F.relu(x.clone(), inplace=True),
    "relu6": lambda x, ids: F.relu6(x),
    "leaky_relu": lambda x, ids: F.leaky_relu(x, 0.1),
    "elu": lambda x, ids: F.elu(x),
    "silu": lambda x, ids: F.silu(x),
    "mish": lambda x, ids: F.mish(x),
    "gelu": lambda x, ids: F.gelu(x, approximate="tanh"),
    "log_sigmoid": lambda x, ids: F.logsigmoid(x),
    "hardswish": lambda x, ids: F.hardswish(x),
    "hardsigmoid": lambda x, ids: F.hardsigmoid(x),
    "hardtanh": lambda x, ids: F.hardtanh(x),
    "softplus": lambda x, ids: F.softplus(x),
    "softsign": lambda x, ids: F.softsign(x),
    "glu": lambda x, ids: F.glu(x, dim=-1),
    "dropout": lambda x, ids: F.dropout(x, 0.1, training=False) + F.dropout(x, 0.0, training=True),
    "to": lambda x, ids: x.to(torch.float64),
    "type": lambda x, ids: x.type(torch.float64),
    "type_as": lambda x, ids: ids.type_as(x),
    "float": lambda x, ids: ids.float(),
    "half": lambda x, ids: x.half(),
    "bfloat16": lambda x, ids: x.bfloat16(),
    "double": lambda x, ids: x.double(),
    "int": lambda x, ids: ids.int(),
    "long": lambda x, ids: x.long(),
    "bool": lambda x, ids: ids.bool(),
    "contiguous": lambda x, ids: x.contiguous(),
    "view_as_complex": lambda x, ids: torch.view_as_real(torch.view_as_complex(x.view(-1, 4, 2))),
    "view_as_real": lambda x, ids: torch.view_as_real(torch.polar(x, x)),
    "real": lambda x, ids: torch.real(torch.polar(x, x)),
    "imag": lambda x, ids: torch.imag(torch.polar(x, x)),
    "polar": lambda x, ids: torch.view_as_real(torch.polar(x, x)),
    "view": lambda x, ids: x.view(1, -1, 2, 4),
    "reshape": lambda x, ids: x.reshape(x.size(0), 4, 2),
    "view_as": lambda x, ids: x.view(1, -1, 8).view_as(x),
    "reshape_as": lambda x, ids: x.view(1, -1, 8).reshape_as(x),
    "flatten": lambda x, ids: x.view(-1, 2, 4).flatten(1),
    "unflatten": lambda x, ids: x.unflatten(-1, (2, 4)),
    "squeeze": lambda x, ids: x.view(1, -1, 8).squeeze(0),
    "unsqueeze": lambda x, ids: x.unsqueeze(1),
    "transpose": lambda x, ids: x.view(1, -1, 2, 4).transpose(1, 2),
    "swapaxes": lambda x, ids: x.swapaxes(0, 1),
    "t": lambda x, ids: x.t(),
    "permute": lambda x, ids: x.view(-1, 2, 4).permute(2, 0, 1),
    "movedim": lambda x, ids: x.view(-1, 2, 4).movedim(0, -1),
    "expand": lambda x, ids: x.unsqueeze(0).expand(3, -1, 8) + B.expand(x.size(0), 8),
    "expand_as": lambda x, ids: B.expand_as(x) + x,
    "broadcast_to": lambda x, ids: torch.broadcast_to(x, (2, x.size(0), 8)),
    "broadcast_tensors": lambda x, ids: torch.broadcast_tensors(x, B)[1],
    "repeat": lambda x, ids: x.repeat(1, 2),
    "tile": lambda x, ids: torch.tile(x, (1, 2)),
    "repeat_interleave": lambda x, ids: x.repeat_interleave(2, dim=0),
    "chunk": lambda x, ids: x.chunk(2, dim=-1)[1],
    "split": lambda x, ids: x.split([3, 5], dim=-1)[1],
    "unbind": lambda x, ids: x.unbind(1)[0],
    "cat": lambda x, ids: torch.cat((x, x.sin()), dim=-1),
    "concat": lambda x, ids: torch.concat((x, torch.empty(0, 8)), dim=0),
    "stack": lambda x, ids: torch.stack((x, x.sin())),
    "numpy_T": lambda x, ids: torch.ops.aten.numpy_T(x),
    "mT": lambda x, ids: torch.ops.aten.mT(x.view(-1, 2, 4)),
    "getattr": lambda x, ids: x.real.T + x.view(-1, 2, 4).mT[..., 0, 0],
    "getitem": lambda x, ids: x[None, :, ::2][..., 1] + W[ids][:, 0],
    "setitem": with_setitem,
    "select": lambda x, ids: torch.select(x, 1, 2),
    "narrow": lambda x, ids: x.narrow(1, 2, 4),
    "index_select": lambda x, ids: torch.index_select(W, 0, ids),
    "gather": lambda x, ids: torch.gather(x, 1, ids[:, None].expand(-1, 2)),
    "scatter": lambda x, ids: torch.zeros_like(x).scatter_(1, ids[:, None], x),
    "scatter_add": lambda x, ids: x.scatter_add(1, ids[:, None], x),
    "embedding": lambda x, ids: F.embedding(ids, W),
    "one_hot": lambda x, ids: F.one_hot(ids, 8),
    "sum": lambda x, ids: x.sum(-1),
    "mean": lambda x, ids: x.pow(2).mean(-1, keepdim=True),
    **{n: over_features(n) for n in ("prod", "amax", "amin", "var", "std", "argmax", "argmin")},
    "any": lambda x, ids: (x > 0).any(-1),
    "all": lambda x, ids: (x > 0).all(-1),
    "logsumexp": lambda x, ids: torch.logsumexp(x.view(-1, 2, 4), (1, 2)),
    "norm": lambda x, ids: x.norm(2, -1, keepdim=True),
    "linalg_vector_norm": lambda x, ids: torch.linalg.vector_norm(x, dim=-1),
    "max": lambda x, ids: x.max(dim=-1)[0] + torch.max(x, x.sin())[:, 0],
    "min": lambda x, ids: x.min(-1).values,
    "softmax": lambda x, ids: F.softmax(x, dim=-1),
    "log_softmax": lambda x, ids: x.log_softmax(1),
    "normalize": lambda x, ids: F.normalize(x, dim=-1),
    "topk": lambda x, ids: torch.topk(x, 2)[0],
    "sort": lambda x, ids: torch.sort(x, dim=-1)[0],
    "argsort": lambda x, ids: torch.argsort(x, dim=1),
    "cumsum": lambda x, ids: x.cumsum(-1),
    "cumprod": lambda x, ids: torch.cumprod(x, dim=1),
    "flip": lambda x, ids: x.view(-1, 2, 4).flip(1, 2),
    "roll": lambda x, ids: x.roll(1, -1),
    "layer_norm": lambda x, ids: F.layer_norm(x, (8,), B, B),
    "rms_norm": lambda x, ids: F.rms_norm(x, (8,), B),
    "linear": lambda x, ids: F.linear(x, W, B),
    "matmul": lambda x, ids: (x @ W) + (W[:, :1].T @ x.T).T,
    "mm": lambda x, ids: torch.mm(x, W),
    "bmm": lambda x, ids: torch.bmm(EXPERTS[ids].transpose(1, 2), x.unsqueeze(-1)).squeeze(-1),
    "addmm": lambda x, ids: torch.addmm(B, x, W),
    "baddbmm": lambda x, ids: torch.baddbmm(x[:, None], x[:, None], EXPERTS[ids]),
    "outer": lambda x, ids: torch.outer(ids.float(), B),
    "einsum": lambda x, ids: torch.einsum("...i,ij->...j", x, W),
    "conv1d": lambda x, ids: F.conv1d(x.T[None], KERNEL, padding=2, groups=8)[..., : x.size(0)],
    "pad": lambda x, ids: F.pad(x, (1, 2)) + F.pad(x, (1, 2, 1, -1)),
    "histc": grouped(fallback),
    "transformers::grouped_mm_fallback": grouped(fallback),
    "_grouped_mm": grouped(lambda x, w, offs: torch._grouped_mm(x.bfloat16(), w.bfloat16(), offs=offs)),
    "zeros": lambda x, ids: torch.zeros(x.size(0), 8) + x,
    "ones": lambda x, ids: torch.ones(x.size(0), 8) + x,
    "empty": lambda x, ids: torch.empty(x.size(0), 8).copy_(x),
    "full": lambda x, ids: torch.full((x.size(0), 8), 2.0) + x,
    "zeros_like": lambda x, ids: torch.zeros_like(x),
    "ones_like": lambda x, ids: torch.ones_like(x),
    "empty_like": lambda x, ids: torch.empty_like(x).copy_(x),
    "full_like": lambda x, ids: torch.full_like(x, 3.0),
    "new_zeros": lambda x, ids: x.new_zeros(x.size(0), 3),
    "new_ones": lambda x, ids: x.new_ones(x.size(0), 3),
    "new_empty": lambda x, ids: x.new_empty(x.size(0), 8).copy_(x),
    "new_full": lambda x, ids: x.new_full((x.size(0), 3), 2.0),
    "tensor": lambda x, ids: x + torch.tensor([2.0]),
    "arange": lambda x, ids: x + torch.arange(x.size(0))[:, None],
    "size": sized,
    "sym_size": lambda x, ids: x * ids[:, None],
    "Size": lambda x, ids: x.view(x.size()[:-1] + (2, 4)),  # noqa: RUF005 (only this spelling makes the node)
    "numel": lambda x, ids: x.view(x.numel() // 8, 2, 4),
    "_assert_scalar": lambda x, ids: x * ids[:, None],
    "_log_api_usage_once": logged,
    "_enter_autocast": with_context(lambda: torch.autocast("cpu", enabled=False)),
    "_exit_autocast": with_context(lambda: torch.autocast("cpu", enabled=False)),
    "_set_grad_enabled": with_context(torch.enable_grad),
}

BACKED_ONLY = ("logsumexp", "roll")
"""Cases that torch 2.13 does not trace with an unbacked token count."""


def all_of(names: list[str]) -> Callable[[Tensor, Tensor], tuple[Any, ...]]:
    """All cases in one function: one trace instead of two hundred."""
    return lambda x, ids: tuple(CASES[name](x, ids) for name in names)
