"""Which token counts a trace is for, and which buckets it can have for that."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import sympy
import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fullgraph_compile.ladder import legal_buckets
from fullgraph_compile.options import Options
from fullgraph_compile.passes.common import expression, placeholders, value_of


def buckets_of(
    options: Options, context: int, serves: Callable[[int], bool], traced: int | None
) -> tuple[tuple[int, ...], str]:
    """The buckets that a trace for the counts that it ``serves`` can have, and why others of the ladder are dropped.

    Args:
        traced: the count that it was traced with; None = it serves every count.
    """
    legal = legal_buckets(options.ladder, context, options.slots)
    ladder = tuple(b for b in legal if serves(b))
    dropped = sorted(set(options.ladder) - set(legal))
    if dropped:
        return ladder, (
            f"no legal batch fills bucket {', '.join(map(str, dropped))} (context_length {context}, request_slots "
            f"{options.slots})"
        )
    if ladder or traced is None:
        return ladder, ""
    # The trace is for few counts, none of them a bucket, such as a branch of the model for one token alone.
    exact = legal_buckets((traced,), context, options.slots) if traced <= legal[-1] else ()
    return exact, "" if exact else f"the trace serves none of the buckets {', '.join(map(str, legal))}"


def _by_an_op(where: str) -> bool:
    """Whether a guard comes from how torch runs an op, not from a branch in the model's code, by where it was made."""
    return "run_node" in where or ("(" in where and "(_dynamo/" not in where)


def other_branch(gm: GraphModule, token: sympy.Symbol) -> Callable[[int], bool] | None:
    """Whether the model's code, which asks for the token count, takes another branch for a count than it did in the
    trace; None if it does not ask.

    A question about a single token alone is left out: models ask it to attend in a simpler way that gives the same.
    """
    conditions = [c for c, where in _conditions(gm, token) if not _by_an_op(where)]
    if not conditions:
        return None

    @cache
    def other(tokens: int) -> bool:
        broken = [c for c in conditions if c.subs(token, tokens) == sympy.false]
        return any(tokens > 1 or c.subs(token, 2) == sympy.false for c in broken)

    return other


def _conditions(gm: GraphModule, token: sympy.Symbol) -> list[tuple[sympy.Basic, str]]:
    """Dynamo's guards on the token count alone, and where each was made."""
    size = _backed_count(gm, token)
    if size is None:
        return []
    env = size.node.shape_env
    return [(g.expr, str(getattr(g, "sloc", ""))) for g in env.guards if g.expr.free_symbols == {token}]


def _backed_count(gm: GraphModule, token: sympy.Symbol) -> torch.SymInt | None:
    """The token count as the graph takes it, if it has a value that was guarded on."""
    sizes = [v for n in placeholders(gm) if isinstance(v := value_of(n), torch.SymInt) and expression(v) == token]
    known = sizes and sizes[0].node.shape_env is not None and not free_unbacked_symbols(sizes[0])
    return sizes[0] if known else None


def guards(gm: GraphModule, token: sympy.Symbol) -> tuple[Callable[[int], bool], int | None, bool]:
    """What Dynamo's guards on a backed token count say.

    Returns:
        Whether they hold for a count: for another the model may take another branch; the count that it was traced
        with, None if it was not backed; and whether torch's ops alone leave out a single token, for its strides.
    """
    size = _backed_count(gm, token)
    if size is None:
        return (lambda tokens: True), None, False
    env = size.node.shape_env
    conditions = _conditions(gm, token)

    def serves(tokens: int) -> bool:
        bounds = env.var_to_range.get(token)
        # The lower bound of 2 is that of a size that was told nothing of 0 and 1; it is no branch.
        inside = bounds is None or (bounds.lower <= max(tokens, 2) and tokens <= bounds.upper)
        return bool(inside) and all(c.subs(token, tokens) != sympy.false for c, _ in conditions)

    hint = size.node.hint
    broken = [where for c, where in conditions if c.subs(token, 1) == sympy.false]
    layouts = bool(broken) and serves(2) and all(map(_by_an_op, broken))
    return serves, int(hint) if hint is not None else None, layouts
