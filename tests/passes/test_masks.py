"""What a mask computes decides what it is; how it is written does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from fullgraph_compile.passes.common import op_name
from fullgraph_compile.passes.masks import MaskKind, recognise_mask
from fullgraph_compile.passes.part import NotUnderstood, part_of
from tests.tracing import TOKENS, trace

Rule = Callable[[Tensor, Tensor], Tensor]
X = torch.randn(1, 2, TOKENS, 8)
POSITIONS = torch.arange(TOKENS)[None]


def traced(mask: Callable[..., Tensor], *inputs: Tensor, backed: bool = True) -> tuple[GraphModule, Any]:
    return trace(lambda x, *rest: F.scaled_dot_product_attention(x, x, x, mask(x, *rest)), X, *inputs, backed=backed)


def kind(gm: GraphModule, token: Any) -> MaskKind:
    call = next(n for n in gm.graph.nodes if op_name(n) == "scaled_dot_product_attention")
    mask = call.kwargs.get("attn_mask", call.args[-1])
    assert isinstance(mask, Node)
    return recognise_mask(mask, part_of(mask, call), token)


def recognised(mask: Callable[..., Tensor], *inputs: Tensor, backed: bool = True) -> MaskKind:
    return kind(*traced(mask, *inputs, backed=backed))


def reason(mask: Callable[..., Tensor], *inputs: Tensor) -> str:
    with pytest.raises(NotUnderstood) as error:
        recognised(mask, *inputs)
    return str(error.value)


def by_index(rule: Rule) -> Callable[..., Tensor]:
    """A mask of all queries (a column) and keys (a row)."""

    def mask(x: Tensor, *_: Tensor) -> Tensor:
        i = torch.arange(x.shape[2], device=x.device)
        return rule(i[:, None], i[None, :])

    return mask


def of_requests(rule: Rule) -> Callable[..., Tensor]:
    """The same, within requests that start at restarts of the positions."""

    def mask(x: Tensor, positions: Tensor) -> Tensor:
        starts = torch.diff(positions[0], prepend=positions[0, :1] - 1) != 1
        request = starts.cumsum(0)
        return by_index(rule)(x) & (request[:, None] == request)

    return mask


CAUSAL = MaskKind(-1, 0, "one", None)

KINDS: dict[str, tuple[Rule, int, int]] = {
    "causal": (lambda q, k: k <= q, -1, 0),
    "causal written the other way": (lambda q, k: ~(k - q > 0), -1, 0),
    "causal window": (lambda q, k: (k <= q) & (k > q - 5), 4, 0),
    "window beyond the small sizes": (lambda q, k: (k <= q) & (q - k < 4096), 4095, 0),
    "window beyond what T x T could hold": (lambda q, k: (k <= q) & (q - k < 262144), 262143, 0),
    "window that is a product": (lambda q, k: (k <= q) & ((q - k).abs() < (q * 0 + 128) * 200), 25599, 0),
    "only itself": (lambda q, k: k == q, 0, 0),
    "two-sided": (lambda q, k: (k >= 0) & (q >= 0), -1, -1),
    "two-sided window": (lambda q, k: (q - k).abs() <= 3, 3, 3),
    "two-sided window, uneven": (lambda q, k: (k - q <= 2) & (q - k <= 6), 6, 2),
}


@functools.cache
def traced_together(masks: str) -> tuple[GraphModule, Any, dict[str, Node]]:
    """All masks of a table in one graph, as tracing takes longer than the rest."""
    table: dict[str, Callable[..., Tensor]] = {
        "KINDS": {name: by_index(rule) for name, (rule, *_) in KINDS.items()},
        "PACKED": {name: of_requests(rule) for name, (rule, *_) in KINDS.items()},
        "WAYS": WAYS,
        "UNKNOWN": {name: by_index(rule) for name, rule in UNKNOWN.items()},
    }[masks]
    gm, token = trace(lambda x, p: (x + 1, *(m(x, p) for m in table.values())), X, POSITIONS, backed=True)
    _, *nodes = gm.graph.output_node().args[0]  # type: ignore[misc, union-attr]
    return gm, token, dict(zip(table, nodes, strict=True))  # type: ignore[arg-type]


def recognised_in(masks: str, name: str) -> MaskKind:
    gm, token, nodes = traced_together(masks)
    return recognise_mask(nodes[name], part_of(nodes[name], gm.graph.output_node()), token)


@pytest.mark.parametrize("name", KINDS)
def test_known_kinds_are_recognised_in_one_request(name: str) -> None:
    _, left, right = KINDS[name]
    assert recognised_in("KINDS", name) == MaskKind(left, right, "one", None)


@pytest.mark.parametrize("name", [n for n in KINDS if n != "only itself"])
def test_known_kinds_are_recognised_per_restart_of_positions(name: str) -> None:
    _, left, right = KINDS[name]
    assert recognised_in("PACKED", name) == MaskKind(left, right, "positions", "l_p_")


def test_unused_positions_leave_all_tokens_one_request() -> None:
    mask = by_index(lambda q, k: k <= q)
    assert recognised(lambda x, p: mask(x) & (p[0] == p[0]), POSITIONS) == CAUSAL


def test_other_int_inputs_do_not_hide_which_one_is_the_positions() -> None:
    mask = of_requests(lambda q, k: (k <= q) & (q - k < 5))
    ids = torch.randint(0, 97, (1, TOKENS))
    found = recognised(lambda x, ids, p: mask(x, p) | (ids != ids), ids, POSITIONS)
    assert (found.left, found.right, found.requests) == (4, 0, "positions")


def test_a_flat_row_of_int32_positions_is_recognised() -> None:
    mask = of_requests(lambda q, k: k <= q)
    assert recognised(lambda x, p: mask(x, p[None]), POSITIONS[0].int()).requests == "positions"


WAYS: dict[str, Callable[..., Tensor]] = {
    "tril of ones": lambda x, _: torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril(),
    "not triu of ones": lambda x, _: ~torch.triu(torch.ones(x.shape[2], x.shape[2], dtype=torch.bool), diagonal=1),
    "triu of -inf": lambda x, _: torch.full((x.shape[2], x.shape[2]), float("-inf")).triu(1),
    "triu of the least float, in 4-D": lambda x, _: torch.triu(
        torch.full((x.shape[2], x.shape[2]), torch.finfo(x.dtype).min), diagonal=1)[None, None, :, :],
    "one minus the mask, times -10000": lambda x, _: (
        1.0 - torch.tril(torch.ones(x.shape[2], x.shape[2]))[None, None]) * -10000.0,
    "expanded over heads": lambda x, _: torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()[None, None].expand(
        1, 2, -1, -1),
    "made like an activation": lambda x, _: x.new_ones(x.shape[2], x.shape[2]).tril() > 0,
    "masked_fill in place": lambda x, _: torch.zeros(x.shape[2], x.shape[2]).masked_fill_(
        torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).triu(1), float("-inf")),
    "matmul of a cumulated row": lambda x, _: torch.ones(x.shape[2], x.shape[2]).cumsum(0).ge(
        torch.ones(x.shape[2], x.shape[2]).cumsum(1)),
    "where": lambda x, _: torch.where(
        torch.arange(x.shape[2])[:, None] >= torch.arange(x.shape[2])[None], 0.0, float("-inf")),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_causal_is_recognised_however_it_is_written(way: str) -> None:
    assert recognised_in("WAYS", way) == CAUSAL


def test_a_mask_that_is_assigned_to_in_place_is_run_with_its_assignments() -> None:
    def causal(x: Tensor) -> Tensor:
        seen = torch.zeros(x.shape[2], x.shape[2], dtype=torch.bool)
        seen[:, :] = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
        return seen

    def sees_no_first_key(x: Tensor) -> Tensor:
        seen = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
        seen[1:, :1] = False
        return seen

    assert recognised(causal) == CAUSAL
    assert "none of" in reason(sees_no_first_key)


def test_the_token_count_may_be_an_unbacked_symbol() -> None:
    gm, token = trace(lambda x: (x + 1, by_index(lambda q, k: (k <= q) & (q - k < 5))(x)), X)
    mask = gm.graph.output_node().args[0][1]  # type: ignore[index]
    assert str(token).startswith("u")
    assert recognise_mask(mask, part_of(mask, gm.graph.output_node()), token) == MaskKind(4, 0, "one", None)


UNKNOWN: dict[str, Rule] = {
    "blocks": lambda q, k: q // 4 == k // 4,
    "causal blocks": lambda q, k: (q // 8192 == k // 8192) & (k <= q),
    "prefix": lambda q, k: (k <= q) | (k < 5),
    "long prefix": lambda q, k: (k <= q) | (k < 900),
    "anti-causal": lambda q, k: k >= q,
    "strictly causal": lambda q, k: k < q,
    "strided": lambda q, k: (k <= q) & ((q - k) % 3 == 0),
    "window and first keys": lambda q, k: (k <= q) & ((q - k < 64) | (k < 4)),
    "causal but for one pair": lambda q, k: (k <= q) & ~((q == 9) & (k == 2)),
    "causal but for one late pair": lambda q, k: (k <= q) & ~((q == 5000) & (k == 2)),
    "nothing": lambda q, k: (k < 0) & (q < 0),
    "all to the left and 2 to the right": lambda q, k: k - q <= 2,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_masks_are_none_of_the_known_kinds(name: str) -> None:
    with pytest.raises(NotUnderstood, match="none of causal, causal window, two-sided, two-sided window"):
        recognised_in("UNKNOWN", name)


def test_requests_by_another_rule_than_restarts_are_not_known() -> None:
    def by_zeros(x: Tensor, positions: Tensor) -> Tensor:
        request = (positions[0] == 0).cumsum(0)
        return by_index(lambda q, k: k <= q)(x) & (request[:, None] == request)

    def by_position(x: Tensor, positions: Tensor) -> Tensor:
        return positions[0][:, None] >= positions[0][None]

    assert "none of" in reason(by_zeros, POSITIONS)
    assert "none of" in reason(by_position, POSITIONS)


def test_masks_that_differ_by_head_are_not_known() -> None:
    def mask(x: Tensor) -> Tensor:
        i = torch.arange(x.shape[2])
        distance = i[:, None] - i[None, :]
        return (distance >= 0) & (distance < torch.tensor([2, 4])[:, None, None])

    assert "none of" in reason(mask)


def test_a_bias_is_not_a_mask() -> None:
    def alibi(x: Tensor) -> Tensor:
        i = torch.arange(x.shape[2])
        distance = (i[None] - i[:, None]).float()
        return torch.where(distance > 0, float("-inf"), 0.5 * distance)

    assert "bias" in reason(alibi)
    assert "bias" in reason(lambda x: torch.full((x.shape[2], x.shape[2]), -50.0).triu(1))


def test_a_mask_from_a_weight_or_from_float_values_is_refused_by_name() -> None:
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    assert "weight" in reason(lambda x, w: w[: x.shape[2], : x.shape[2]], weight)
    assert "values of" in reason(lambda x: x[0, 0, :, :1] * 0 + torch.zeros(x.shape[2], x.shape[2]))


def test_a_padding_mask_is_refused_with_the_way_out() -> None:
    causal = by_index(lambda q, k: k <= q)
    padding = torch.ones(1, TOKENS, dtype=torch.long)
    for given in (padding, padding.bool()):
        why = reason(lambda x, p: causal(x) & (p[:, None, None, :] != 0), given)
        assert "a padding mask was given" in why
        assert "fgc.compile" in why
    assert "a padding mask was given" in reason(lambda x, p: (1.0 - p[:, None, None, :].float()) * -1e9, padding)
    assert "a padding mask was given" in reason(
        lambda x, p, m: of_requests(lambda q, k: k <= q)(x, p) & (m != 0), POSITIONS, padding
    )


def test_an_all_true_padding_mask_that_is_made_in_the_graph_is_no_padding() -> None:
    causal = by_index(lambda q, k: k <= q)
    assert recognised(lambda x: causal(x) & (x.new_ones(1, x.shape[2])[:, None, None, :] > 0)) == CAUSAL


def test_random_numbers_and_attributes_are_not_run() -> None:
    assert "no fixed value" in reason(lambda x: torch.rand(x.shape[2], x.shape[2]) >= 0)
    assert "no fixed value" in reason(lambda x: F.dropout(torch.zeros(x.shape[2], x.shape[2]), 0.0))


def test_devices_in_the_part_are_not_needed() -> None:
    def mask(x: Tensor, positions: Tensor) -> Tensor:
        i = torch.arange(x.shape[2], device="cpu")
        seen = (i[:, None] >= i.to("cpu")).to(x.device)
        starts = (torch.diff(positions[0], prepend=positions[0, :1] - 1) != 1).cumsum(0)
        return seen & (starts[:, None] == starts).to(device="cpu")

    gm, token = traced(mask, POSITIONS)
    moved = 0
    for node in gm.graph.nodes:
        for device in (torch.device("cpu"), "cpu"):
            if node.op != "placeholder" and (device in node.args or node.kwargs.get("device") == device):
                node.args = tuple("cuda:1" if a == device else a for a in node.args)
                node.kwargs = {k: torch.device("cuda", 1) if k == "device" else v for k, v in node.kwargs.items()}
                moved += 1
    assert moved >= 3
    assert kind(gm, token).requests == "positions"


def test_recognition_leaves_the_random_state_and_gives_the_same_twice() -> None:
    gm, token = traced(of_requests(lambda q, k: k <= q), POSITIONS)
    before = torch.get_rng_state()
    assert kind(gm, token) == kind(gm, token)
    assert torch.equal(before, torch.get_rng_state())


def test_a_shape_that_is_not_the_token_count_is_refused() -> None:
    gm, token = trace(
        lambda x, m: F.scaled_dot_product_attention(x, m, m, torch.ones(x.shape[2], 15) > 0),
        X, torch.randn(1, 2, 15, 8), backed=True,
    )  # fmt: skip
    with pytest.raises(NotUnderstood, match="not the token count"):
        kind(gm, token)
