"""Rules of the padding proof for products: matmul and its kin, convolutions, and the ops that stand for attention."""

from __future__ import annotations

from typing import Any

from . import row_checks as check
from .row_functions import Rule
from .row_state import UNIFORM, Call, Padded, Refused, Rows, State

Labels = list[Any]


def product(call: Call, operands: list[tuple[Any, Labels]], out: Labels) -> State:
    """A product written as einsum: the token dim has one label, and that label is kept."""
    rows: list[Rows] = []
    places: set[tuple[Any, int]] = set()
    for x, labels in operands:
        state = call.state(x)
        if isinstance(state, Rows):
            rows.append(state)
            places.add((labels[state.axis], state.inner))
            check.not_contracted(call, labels[state.axis] not in out)
    if not rows:
        return UNIFORM
    check.lines_up(call, places)
    check.same_order(call, rows)
    label = next(iter(places))[0]
    return Rows(out.index(label), rows[0].inner, rows[0].order) if label in out else UNIFORM


def batch(n: int) -> Labels:
    """Labels of n broadcast dims, counted from the right."""
    return [("batch", i) for i in range(n, 0, -1)]


def matmul_of(skip: int) -> Rule:
    """matmul, mm, bmm; with ``skip`` operands in front that are added to the product (addmm, baddbmm)."""

    def rule(call: Call) -> State:
        a = call.arg(skip, *(("mat1", "batch1") if skip else ("input",)))
        b = call.arg(skip + 1, "other", "mat2", "batch2")
        na, nb = call.ndim(a), call.ndim(b)
        left = ["k"] if na == 1 else [*batch(na - 2), "m", "k"]
        right = ["k"] if nb == 1 else [*batch(nb - 2), "k", "n"]
        out = [*batch(max(na, nb, 2) - 2), *(["m"] if na > 1 else []), *(["n"] if nb > 1 else [])]
        added = [(x, out[len(out) - call.ndim(x) :]) for x in ([call.first] if skip else [])]
        return product(call, [*added, (a, left), (b, right)], out)

    return rule


def linear(call: Call) -> State:
    x, weight, bias = call.first, call.arg(1, "weight"), call.arg(2, "bias")
    lead = batch(call.ndim(x) - 1)
    head = ["n"] if call.ndim(weight) == 2 else []
    added = [] if bias is None else [(bias, head)]
    return product(call, [(x, [*lead, "k"]), (weight, [*head, "k"]), *added], [*lead, *head])


def outer(call: Call) -> State:
    return product(call, [(call.first, ["m"]), (call.arg(1, "vec2"), ["n"])], ["m", "n"])


def einsum(call: Call) -> State:
    equation, operands = call.args[0], call.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    inputs, arrow, result = str(equation).replace(" ", "").partition("->")
    if not arrow:
        raise Refused("einsum without -> is not understood")

    def labels(term: str, ndim: int) -> Labels:
        head, dots, tail = term.partition("...")
        return [*head, *(batch(ndim - len(head) - len(tail)) if dots else []), *tail]

    terms = [(x, labels(t, call.ndim(x))) for x, t in zip(operands, inputs.split(","), strict=True)]
    return product(call, terms, labels(result, call.ndim()))


def pad(call: Call) -> State:
    amounts, n = call.arg(1, "pad"), call.ndim()
    check.not_a_value(call, amounts, call.arg(3, "value"))
    state = call.raw(call.first)
    if not isinstance(state, (Rows, Padded)):
        return call.state(call.first)
    at = 2 * (n - 1 - state.axis)
    left, right = (amounts[at], amounts[at + 1]) if at < len(amounts) else (0, 0)
    if not isinstance(left, int) or not isinstance(right, int):
        raise Refused("pads the token dim by a number that is not fixed")
    if (left, right) == (0, 0):
        return state
    if call.arg(2, "mode", default="constant") != "constant":
        raise Refused("pads the token dim with rows of the call")
    return settle(call, state, left, False)


def conv1d(call: Call) -> State:
    state, weight = call.raw(call.first), call.arg(1, "weight")
    if any(call.state(x) != UNIFORM for x in call.tensors() if x is not call.first):
        raise Refused("its weight depends on rows")
    if isinstance(state, Rows) and state.axis == 0 and call.ndim() == 3:
        return Rows(0, state.inner, state.order)
    if not isinstance(state, (Rows, Padded)):
        return call.state(call.first)
    stride, padding, dilation = (
        call.arg(i, name, default=d) for i, name, d in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    stride, padding, dilation = (x[0] if isinstance(x, (tuple, list)) else x for x in (stride, padding, dilation))
    if state.axis != call.ndim() - 1 or stride != 1 or not isinstance(padding, int):
        raise Refused("a convolution mixes rows")
    taps = (int(call.shape(weight)[-1]) - 1) * dilation
    return settle(call, state, padding - taps, taps > 0)


def settle(call: Call, state: Rows | Padded, shift: int, mixed: bool) -> State:
    """Rows again once the size is the token count and none of them looks ahead; they then belong to one request."""
    if isinstance(state, Rows):
        if state.order is not None or state.inner != 1:
            raise Refused("shifts rows that are not one a token")
        state = Padded(state.axis, 0, False)
    state = Padded(state.axis, state.lag + shift, state.mixed or mixed)
    if call.shape()[state.axis] != call.token:
        return state
    check.looks_back(call, state.lag)
    if state.mixed or state.lag:
        call.single(call.node, "a row sees the rows before it, so the call must hold one request")
    return Rows(state.axis)


def attention(call: Call) -> State:
    """The marked op, by contract: what it does across rows is the batch's business, and padded rows come out zero."""
    for i, name in enumerate(("q", "k", "v")):
        if call.state(call.arg(i, name)) != Rows(0):
            raise Refused("attention needs q, k and v as rows with the token dim first")
    for x in (call.arg(3, "sinks"), call.arg(4, "slopes")):
        if x is not None and call.state(x) != UNIFORM:
            raise Refused("sinks and slopes of attention must not depend on rows")
    return Rows(0)


def hosted_attention(call: Call) -> State:
    """An engine's own attention, by contract: it keeps requests apart.  Its padded rows hold anything; no rule may take
    them for zeros."""
    for i, name in enumerate(("q", "k", "v")):
        x = call.arg(i, name)
        if x is not None and call.state(x) != Rows(0):
            raise Refused("attention needs q, k and v as rows with the token dim first")
    for x in call.arg(3, "others"):
        if call.state(x) not in (Rows(0), UNIFORM):
            raise Refused("attention takes tensors with one row a token, or the same for all tokens")
    return Rows(0)
