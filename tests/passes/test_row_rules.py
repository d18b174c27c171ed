"""Every line of the op table and every check is what accepts, or refuses, something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from fullgraph_compile import ops
from fullgraph_compile.passes import row_checks, row_rules
from fullgraph_compile.passes.check_row_independence import check_row_independence
from fullgraph_compile.passes.common import expression, placeholders, value_of
from fullgraph_compile.passes.row_memory import canonical
from tests.passes.row_cases import BACKED_ONLY, CASES, EXPERTS, KERNEL, all_of, fallback
from tests.tracing import TOKENS, trace

Traced = tuple[GraphModule, sympy.Symbol]

UNTRACED: dict[str, tuple[str, Any]] = {
    "grouped_mm": ("_grouped_mm", F.grouped_mm),
    "_check": ("_assert_scalar", torch._check),  # as torch 2.11 traces it
}
"""Spellings that this torch turns into another one: the node of that one is given the target."""


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(TOKENS, 8), torch.arange(TOKENS) % 8


@pytest.fixture(scope="module")
def graphs() -> list[Traced]:
    """All cases: those that trace with an unbacked token count, and the others."""
    with torch.no_grad():
        unbacked = trace(all_of([n for n in CASES if n not in BACKED_ONLY]), *inputs())
        backed = trace(all_of(list(BACKED_ONLY)), *inputs(), backed=True)
        # Nodes that only an unbacked count has: on torch 2.11 the first trace has a backed one.
        sizes = trace(all_of(["sym_size", "_assert_scalar"]), *inputs())
    return [unbacked, backed, sizes]


def ops_of(gm: GraphModule) -> set[str]:
    return {canonical(n)[0] for n in gm.graph.nodes if n.op.startswith("call")}


def test_every_line_has_a_case() -> None:
    assert set(CASES) | set(UNTRACED) == set(row_rules.TABLE)


def test_every_case_is_padding_safe(graphs: list[Traced]) -> None:
    for gm, token in graphs:
        proof = check_row_independence(gm, token)
        assert proof.padding_safe, str(proof)
        assert {r.op for r in proof.single_request} <= {"getitem", "pad", "arange"}


@pytest.mark.parametrize("op", sorted(row_rules.TABLE))
def test_without_its_line_the_op_is_refused(op: str, graphs: list[Traced], monkeypatch: pytest.MonkeyPatch) -> None:
    spelt, target = UNTRACED.get(op, (op, None))
    gm, token = next(((g, t) for g, t in graphs if spelt in ops_of(g)), (None, None))
    assert gm is not None, f"no case uses {op}"
    if target is not None:
        for node in gm.graph.nodes:
            if node.op == "call_function" and canonical(node)[0] == spelt:
                monkeypatch.setattr(node, "target", target)
        assert check_row_independence(gm, token).padding_safe
    monkeypatch.delitem(row_rules.TABLE, op)
    proof = check_row_independence(gm, token)
    assert any(r.reason == row_rules.UNKNOWN and r.op.rstrip("_") == canonical_tail(op) for r in proof.refusals)


def canonical_tail(op: str) -> str:
    # A packet's plain name has no namespace.
    return "grouped_mm_fallback" if op.startswith("transformers::") else op


def run(gm: GraphModule, token: sympy.Symbol, x: Tensor, ids: Tensor) -> list[Tensor]:
    """The outputs of a traced graph on these tokens; its weights are those that it was traced with."""
    values: list[Any] = []
    for node, given in zip(placeholders(gm), gm.meta["example_inputs"], strict=True):
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            values.append(len(ids))
        elif isinstance(value, Tensor) and any(expression(s) == token for s in value.shape):
            values.append(x if value.is_floating_point() else ids)
        else:
            values.append(given)
    return list(gm(*values))


def real_rows(out: Tensor, fake: Tensor, token: sympy.Symbol, real: int) -> Tensor:
    for dim, size in enumerate(fake.shape):
        ratio = expression(size) / token
        if token in sympy.sympify(expression(size)).free_symbols:
            return out.narrow(dim, 0, real * int(ratio))
    return out


def test_real_rows_of_every_case_ignore_the_rows_past_the_total(
    graphs: list[Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run what the proof accepts: other junk, the same bits; no junk, the same values."""
    monkeypatch.setattr(ops, "_host", lambda q, *others: 2 * q)
    real, bucket = 9, 16
    g = torch.Generator().manual_seed(3)
    x, ids = torch.randn(real, 8, generator=g), torch.randint(0, 8, (real,), generator=g)

    def padded(seed: int) -> tuple[Tensor, Tensor]:
        j = torch.Generator().manual_seed(seed)
        junk = 100 * torch.randn(bucket - real, 8, generator=j)
        return torch.cat((x, junk)), torch.cat((ids, torch.randint(0, 8, (bucket - real,), generator=j)))

    for gm, token in graphs:
        fakes = [value_of(n) for n in next(n for n in gm.graph.nodes if n.op == "output").args[0]]
        exact, one, two = run(gm, token, x, ids), run(gm, token, *padded(1)), run(gm, token, *padded(2))
        assert len(fakes) == len(exact) > 1
        for i, fake in enumerate(fakes):
            a, b, c = (real_rows(out[i], fake, token, real) for out in (one, two, exact))
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda m, i=i: f"output {i}: {m}")
            torch.testing.assert_close(a, c, equal_nan=True, msg=lambda m, i=i: f"output {i}: {m}")


def permuted(x: Tensor, ids: Tensor) -> Tensor:
    return x + x[torch.sort(ids)[1]]


def wrong_counts(x: Tensor, ids: Tensor) -> Tensor:
    """Groups of other numbers than those that the rows were sorted by."""
    keys, perm = torch.sort(ids)
    counts = torch.histc((keys * 0).float(), bins=8, min=0, max=7)
    out = fallback(x[perm], EXPERTS, counts.cumsum(0, dtype=torch.int32))
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0))
    return out[inverse]


def shared_inverse(x: Tensor, ids: Tensor) -> Tensor:
    perm = torch.sort(ids)[1]
    inverse = torch.empty_like(perm)
    other = inverse.view(-1, 1)
    inverse[perm] = torch.arange(perm.size(0))
    return x * other


def masked(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids > 3]


def doubled(x: Tensor, ids: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


Fault = Callable[[Tensor, Tensor], Any]

FAULTS: dict[str, tuple[Fault, str, tuple[str, ...]]] = {
    # check: a function that only this check stops, words of its reason, nets under it that must be cut, too
    "one_token_dim": (lambda x, ids: x[None].expand(x.size(0), -1, 8).sum(0), "two token dims", ()),
    "followed": (lambda x, ids: torch.cat((x, x.sin()), 0), "cannot be followed", ("not_along",)),
    "not_a_value": (lambda x, ids: x / x.size(0), "token count as a value", ()),
    "not_along": (lambda x, ids: x.softmax(0), "over the token dim", ()),
    "same_product": (lambda x, ids: x[None].view(1, 8, -1), "before the token dim", ()),
    "lines_up": (lambda x, ids: (x[:, None] + x[None]).sum(1), "different places", ("one_token_dim",)),
    "same_order": (permuted, "order of a sort", ()),
    "not_contracted": (lambda x, ids: x.T @ x, "sums over the token dim", ()),
    "whole": (lambda x, ids: x[-1], "picks rows", ("followed",)),
    "no_mask": (masked, "boolean mask", ("no_row_gather", "followed")),
    "no_row_gather": (lambda x, ids: x[ids], "by an index", ()),
    "not_random": (lambda x, ids: F.dropout(x, 0.5, training=True), "random", ()),
    "looks_back": (lambda x, ids: F.conv1d(x.T[None], KERNEL, padding=1, groups=8), "later rows", ()),
    "counts_experts": (wrong_counts, "counts rows", ()),
    "not_a_root": (doubled, "mutates an input", ()),
    "not_shared": (shared_inverse, "in place", ()),
}


def off(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        assert callable(getattr(row_checks, name))
        monkeypatch.setattr(row_checks, name, lambda *_: None)


def test_every_check_has_a_fault() -> None:
    checks = {n for n, f in vars(row_checks).items() if getattr(f, "__module__", "") == row_checks.__name__}
    assert checks == set(FAULTS) | {"same_device"}


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_only_this_check_refuses_the_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, words, nets = FAULTS[name]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        gm, token = trace(fault, *inputs())
    off(monkeypatch, *(nets if name == "followed" else ()))
    refused = check_row_independence(gm, token).refusals
    assert [words in r.reason for r in refused] == [True], refused
    off(monkeypatch, name, *nets)
    proof = check_row_independence(gm, token)
    assert proof.padding_safe, str(proof)


def moved_to_the_host() -> Traced:
    gm, token = trace(lambda x, ids: x.to("cpu") + 1, *inputs())
    for node in gm.graph.nodes:
        if node.op == "placeholder" and isinstance(value_of(node), Tensor):
            node.meta["example_value"] = value_of(node).to("meta")
    return gm, token


def test_a_move_to_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, token = moved_to_the_host()
    assert [r.op for r in check_row_independence(gm, token).refusals] == ["to"]
    off(monkeypatch, "same_device")
    assert check_row_independence(gm, token).padding_safe


def test_a_move_to_the_same_device_is_fine() -> None:
    gm, token = trace(lambda x, ids: x.to("cpu") + 1, *inputs())
    assert check_row_independence(gm, token).padding_safe
