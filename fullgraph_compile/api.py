"""What a user does with a compiled body besides calling it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from fullgraph_compile.batch import PrefillBatch, active_batch, no_active_batch
from fullgraph_compile.batch_of_call import check_batch
from fullgraph_compile.captured import CapturedGraph
from fullgraph_compile.compiled_body import CompiledBody, compiled_body
from fullgraph_compile.dispatch import Decision, Reason, Route
from fullgraph_compile.integrations.plain import NotServed, packed_dim
from fullgraph_compile.integrations.transformers import is_transformers
from fullgraph_compile.ladder import capture_lengths
from fullgraph_compile.options import disabled
from fullgraph_compile.pipeline import expected_decision
from fullgraph_compile.plain_graph import PlainGraph
from fullgraph_compile.registry import compiled_for, unwrap
from fullgraph_compile.report import Report, merge, own_calls
from fullgraph_compile.static_graph import StaticGraph


def report(body: Any = None) -> Report:
    """What was captured, proven, replayed and refused, and why.

    Args:
        body: what ``torch.compile`` or ``fgc.compile`` returned, or the module itself; None = everything.
    """
    reports = {id(c.report): c.report for c in compiled_for(unwrap(body))}
    return merge(reports.values())


def explain(body: Any, *args: Any, **kwargs: Any) -> str:
    """The decision for one call, in words, without running it.

    Args:
        body: what ``torch.compile`` or ``fgc.compile`` returned.
        args, kwargs: the call's arguments; an active batch counts as in the call itself.
    """
    return str(decision(body, *args, **kwargs))


def decision(body: Any, *args: Any, **kwargs: Any) -> Decision:
    """Route, bucket and reason of one call, without running it."""
    _module_of(body)
    compiled = _compiled_body(body)
    if compiled is not None:
        whole = unwrap(body)
        places, names = _arguments_of_body(compiled, whole, args, kwargs)
        if compiled.whole is not None and whole is compiled.whole.module():
            return compiled.whole.explain(args, kwargs, names)
        return compiled.explain(places, names)
    if disabled():
        return Decision(Route.EAGER, None, Reason.DISABLED)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim()]
    if not tensors:
        raise TypeError("explain() takes the arguments of the call; none of these is a tensor")
    try:
        tokens = tensors[0].shape[packed_dim("the first argument", tensors[0])]
    except NotServed as refusal:
        return Decision(Route.COMPILED, None, refusal.reason)
    batch = active_batch()
    if batch is not None:
        check_batch(batch, tokens, tensors[0].device)
    if torch.is_grad_enabled() and any(p.requires_grad for p in unwrap(body).parameters()):  # type: ignore[union-attr]
        return Decision(Route.EAGER, None, Reason.GRAD)
    batch = batch or PrefillBatch([tokens], device=tensors[0].device)
    found = compiled_for(unwrap(body))
    for graph in reversed(found):
        if isinstance(graph, CapturedGraph):
            return graph.runner.decide(batch)
    for plain in reversed(found):
        if isinstance(plain, PlainGraph):
            return Decision(Route.COMPILED, None, plain.reason)
    return Decision(Route.COMPILED, None, Reason.STATIC_SHAPE)


def _arguments_of_body(
    compiled: CompiledBody, whole: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of the arguments of a model with a head those that its body gets."""
    if whole is compiled.module():
        return args, kwargs
    names = list(inspect.signature(whole.forward).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    heads = set(names) - set(compiled.binder.names)
    return (), {k: v for k, v in given.items() if k not in heads and k != "return_dict"}


def warmup(body: Any, *args: Any, **kwargs: Any) -> Report:
    """Trace, compile and capture now, not at the first request.

    Args:
        body: what ``torch.compile`` or ``fgc.compile`` returned.
        args, kwargs: an example call, of a size that a bucket serves; a transformers model needs none.

    Returns:
        The report, with every bucket captured or turned off with a reason.  Where no bucket serves the example nothing
        is captured, and the report says why, under ``strict`` too.

    Raises:
        TypeError: an example call is needed and none was given.
        ValueError: nothing of the module was compiled.
    """
    module = _module_of(body)
    result = _warmed_up(body, module, args, kwargs)
    if not compiled_for(module) and not disabled():
        raise ValueError(
            f"nothing of this {type(module).__name__} is compiled, or its call does not get there; warmup() takes what "
            'fgc.compile or torch.compile(..., backend="full_prefill") returned'
        )
    return result


def _warmed_up(body: Any, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Report:
    call = body if callable(body) else module
    compiled = _compiled_body(body)
    mode = torch.inference_mode() if torch.is_grad_enabled() else nullcontext()
    with mode, no_active_batch(), own_calls():
        if args or kwargs:
            _uncounted(body, call, args, kwargs)
            return report(body)
        # A head is no part of what is captured.
        traced: Any = compiled.module() if compiled is not None else module
        if not is_transformers(traced):
            raise TypeError(
                f"warmup() does not know how {type(module).__name__} is called; give the arguments of one call, "
                "as in warmup(body, input_ids=ids, position_ids=positions)"
            )
        device = next(module.parameters()).device
        names = inspect.signature(traced.forward).parameters

        def run(lengths: list[int]) -> None:
            batch = PrefillBatch(lengths, device=device)
            example: dict[str, Any] = {"input_ids": torch.zeros(1, batch.tokens, dtype=torch.long, device=device)}
            if "position_ids" in names and compiled is None:
                example["position_ids"] = batch.position_ids[None]
            if "use_cache" in names:
                example["use_cache"] = False
            with batch if batch.requests > 1 else nullcontext():
                _uncounted(body, traced if compiled else call, (), example)

        if compiled is not None:
            options = compiled.options
            context = options.context_length or options.max_tokens
            run(_example(options.ladder, context, options.slots, device, partial(expected_decision, options)))
            return report(body)
        details = {id(c.report): dict(c.report.details) for c in compiled_for(module)}
        # Outside of fgc.compile the first graph is for one size; the second size makes it symbolic.
        run([5])
        run([7])
        for graph in compiled_for(module):
            if isinstance(graph, CapturedGraph) and not graph.report.ready:
                # No bucket served these two, which says nothing of the user's calls.
                graph.report.details = details.get(id(graph.report), {})
                limits = graph.runner.limits
                run(_example(limits.ladder, limits.context_length, limits.slots, device, graph.runner.decide))
    return report(body)


def _example(
    ladder: Sequence[int], context: int, slots: int, device: torch.device, decide: Callable[[PrefillBatch], Decision]
) -> list[int]:
    """New tokens of the requests of a call that replays a graph; five of one request where there is none."""
    # In a trace 0 and 1 are special, and so are sizes that another dim of the model has, as powers of two often are.
    found = [[5], [3], [2]]
    for bucket in ladder:
        tokens = max(1, bucket - 1)
        found += [[min(tokens, context)], capture_lengths(tokens, context, slots) or []]
    for lengths in filter(None, found):
        if decide(PrefillBatch(lengths, device=device)).route is Route.GRAPH:
            return lengths
    return found[0]


def _uncounted(body: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make a call of our own, and leave the counts of the user's calls as they were."""
    counts = {id(c.report): (c.report, c.report.copy()) for c in compiled_for(unwrap(body))}
    try:
        call(*args, **kwargs)
    finally:
        for compiled in compiled_for(unwrap(body)):
            now = compiled.report
            _, then = counts.get(id(now), (now, Report()))
            now.take_counts(then)


def release(body: Any) -> None:
    """Free the graphs and their memory; the next call that fits captures again, without compiling."""
    for compiled in compiled_for(_module_of(body)):
        if isinstance(compiled, (CompiledBody, CapturedGraph, StaticGraph)):
            compiled.release()


def close(body: Any) -> None:
    """Undo: free the graphs, and give a module that ``fgc.compile`` changed its own forward back."""
    release(body)
    compiled = _compiled_body(body)
    if compiled is not None:
        compiled.close()


def _module_of(body: Any) -> torch.nn.Module:
    """The module; all of them, which None stands for in a report, are none."""
    module = unwrap(body)
    if module is None:
        raise TypeError("None is not a compiled module; give what fullgraph_compile.compile or torch.compile returned")
    return module


def _compiled_body(body: Any) -> CompiledBody | None:
    return compiled_body(unwrap(body))
