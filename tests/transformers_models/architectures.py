"""One architecture of transformers: built tiny, compiled, called, compared with eager, and sorted.

Used by ``benchmarks/models.py`` for all of them and by ``test_slice.py`` for some; imports torch and transformers only
where it needs them, so that reading a result needs neither.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.transformers_models.calls import CALLS, expected, real, rows_of, tokens_of, with_decoder, without_cache
from tests.transformers_models.random_weights import EXPERTS, first_call, with_weights
from tests.transformers_models.tiny_configs import VARIANTS, tiny_config

REPLAYS, REFUSED, NOT_TRACED, NOT_BUILT, STOPPED, UNEQUAL = (
    "replays",
    "refused",
    "does not trace",
    "cannot be built tiny",
    "ran out of time or crashed",
    "UNEQUAL",
)
MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}
# Relative to the largest output of eager.
TOLERANCE = 1e-4
OPTIONS: dict[str, Any] = {"graphs": "tape", "compiler": "eager", "max_tokens": 32, "request_slots": 4}


@dataclass
class Result:
    """What became of one architecture.

    Attributes:
        status: one of the constants above.
        reason: why, where it does not replay; the first inequality, where there is one.
        replays: calls that replayed a graph.
        eligible: calls that could have: all but left-padded ones of a model to whose real tokens padding on the left
            means something.
        calls: calls that eager could make.
        error: largest difference, relative to the largest output.
        note: something to know about a model that replays.
    """

    mapping: str
    name: str
    model: str = ""
    status: str = ""
    reason: str = ""
    replays: int = 0
    eligible: int = 0
    calls: int = 0
    error: float = 0.0
    seconds: float = 0.0
    note: str = ""
    fallbacks: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(mapping: str, name: str) -> Result:
    """Build, compile, call, compare and sort one architecture; raises nothing that the model is to blame for."""
    start = time.perf_counter()
    result = Result(mapping, name)
    with quiet() as said:
        try:
            model = build(result)
        except Exception as e:
            result.status, result.reason = NOT_BUILT, in_short(e)
        else:
            _measure(model, result, said)
    result.seconds = round(time.perf_counter() - start, 1)
    return result


def build(result: Result) -> Any:
    """The model in eval mode with random weights, by the first recipe whose model runs and gives finite numbers.

    Raises:
        Exception: of the first recipe, where none works.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    classes = getattr(modeling_auto, MAPPINGS[result.mapping])[result.name]
    result.model = classes if isinstance(classes, str) else classes[0]
    kind = getattr(transformers, result.model)
    first: Exception | None = None
    for variant in VARIANTS:
        try:
            model = with_weights(kind, tiny_config(kind.config_class, variant, causal=result.mapping == "causal"))
            first_call(model)
            return model
        except Exception as e:
            first = first or e
    assert first is not None
    raise first


def _has_experts(model: Any) -> bool:
    return any(hasattr(m, "apply_gate") or type(m).__name__.endswith("Experts") for m in model.modules())


def _measure(model: Any, result: Result, said: list[str]) -> None:
    import torch

    import fullgraph_compile as fgc

    if _has_experts(model):
        result.note = f"experts by {EXPERTS}"
    eager = copy.deepcopy(model)
    more = without_cache(model)
    try:
        fgc.compile(model, **OPTIONS)
    except Exception as e:
        result.status, result.reason = REFUSED, f"fgc.compile raised {in_short(e)}"
        return
    reasons: Counter[str] = Counter()
    details: dict[str, str] = {}
    unequal: list[str] = []
    for seed, (kind, lengths) in enumerate(CALLS):
        what = f"{kind} {list(lengths)}"
        inputs = with_decoder(model, tokens_of(lengths, kind, seed))
        with torch.no_grad():
            try:
                want = expected(eager, kind, lengths, inputs, more)
            except Exception as e:
                # Not a call that this model can make: nothing to compare with.
                _note(result, f"eager cannot do {what}: {in_short(e)}")
                continue
            result.calls += 1
            before = fgc.report(model)
            batch = fgc.PrefillBatch(list(lengths), device="cpu") if kind == "packed" else nullcontext()
            try:
                with batch:
                    got = real(rows_of(model(**inputs, **more)), inputs)
            except fgc.FallbackError as e:
                if kind != "packed":
                    unequal.append(f"{what}: raises {in_short(e)}")
                    continue
                reasons["refused within a PrefillBatch"] += 1
                details.setdefault("refused within a PrefillBatch", in_short(e))
                result.eligible += 1
                continue
            except Exception as e:
                unequal.append(f"{what}: raises {in_short(e)}")
                continue
        after = fgc.report(model)
        fell = after.fallbacks - before.fallbacks
        # A launch whose result was thrown away is no answer.
        replayed = sum(after.replays.values()) > sum(before.replays.values()) and not fell
        result.replays += replayed
        for reason in fell:
            reasons[reason.name] += 1
            # What went wrong with a bucket is logged only.
            told = after.details.get(reason) or next((x.split(f"{reason.value}: ")[1] for x in said
                                                      if f"{reason.value}: " in x), "")  # fmt: skip
            details.setdefault(reason.name, shorten(f"{reason.value}: {told}".rstrip(": ")))
        # Packing drops the padding: where it means something to a model's real tokens, running as it is is right.
        if kind == "left" and not replayed and fgc.Reason.MASK in fell:
            _note(result, "left padding is refused")
        else:
            result.eligible += 1
        error = difference(got, want)
        result.error = max(result.error, error)
        if not error <= TOLERANCE:
            unequal.append(f"{what}: differs by {error:.2g} ({'replayed' if replayed else 'not replayed'})")
    result.fallbacks = dict(reasons)
    sort(result, reasons, details, unequal)


def _note(result: Result, text: str) -> None:
    if text not in result.note and result.note.count(";") < 2:
        result.note = f"{result.note}; {text}" if result.note else text


def difference(got: Any, want: Any) -> float:
    """Largest difference relative to the largest output; not finite = not equal."""
    import torch

    if got.shape != want.shape:
        return math.inf
    scale = max(1e-6, float(want.abs().max()))
    worst = float((got - want).abs().max()) / scale
    return worst if math.isfinite(worst) and bool(torch.isfinite(got).all()) else math.inf


def sort(result: Result, reasons: dict[str, int], details: dict[str, str], unequal: list[str]) -> None:
    if unequal:
        result.status, result.reason = UNEQUAL, "; ".join(unequal[:3])
    elif not result.calls:
        result.status, result.reason = NOT_BUILT, result.note
    elif result.eligible and result.replays >= 0.95 * result.eligible:
        result.status = REPLAYS
    else:
        top = max(reasons, key=reasons.__getitem__) if reasons else ""
        result.status = NOT_TRACED if top == "NOT_TRACED" else REFUSED
        text = details.get(top, "no reason was reported")
        result.reason = f"{result.replays} of {result.eligible} replay; {text}" if result.replays else text


def in_short(e: BaseException) -> str:
    """An exception in one line, without what is particular to a machine."""
    lines = [x.strip() for x in str(e).strip().splitlines() if x.strip()]
    return shorten(f"{type(e).__name__}: {lines[0] if lines else ''}")


def shorten(text: str, limit: int = 200) -> str:
    """Without paths of this machine, in ``limit`` characters."""
    import re

    text = re.sub(r"(?:/[\w.+-]+)+/([\w.-]+)", r"\1", " ".join(text.split()))
    return text if len(text) <= limit else text[: limit - 3] + "..."


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def quiet() -> Iterator[list[str]]:
    """No warnings of transformers; what the compiler says goes to the list."""
    import warnings

    heard, ours, theirs = _Heard(), logging.getLogger("fullgraph_compile"), logging.getLogger("transformers")
    before = ours.propagate, theirs.level
    ours.addHandler(heard)
    ours.propagate = False
    theirs.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield heard.said
    finally:
        ours.removeHandler(heard)
        ours.propagate = before[0]
        theirs.setLevel(before[1])
