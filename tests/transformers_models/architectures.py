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

from tests.transformers_models.tiny_configs import VARIANTS, VOCABULARY, tiny_config

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
EXPERTS = "batched_mm"
OPTIONS: dict[str, Any] = {"graphs": "tape", "compiler": "eager", "max_tokens": 32, "request_slots": 4}
# Kind of call and the requests' lengths; more than one request, windows overrun, one token, and both sides of padding.
CALLS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("right", (3, 7, 4)),
    ("packed", (5, 4)),
    ("packed", (11,)),
    ("left", (3, 7, 4)),
    ("dense", (5, 5)),
    ("packed", (7, 1, 3, 5)),
    ("right", (9, 1)),
    ("packed", (1,)),
    ("left", (2, 6)),
    ("packed", (12, 6, 2)),
    ("right", (1, 8, 2, 8)),
    ("dense", (17,)),
)


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
            model = _with_weights(kind, tiny_config(kind.config_class, variant, causal=result.mapping == "causal"))
            _first_call(model)
            return model
        except Exception as e:
            first = first or e
    assert first is not None
    raise first


def _with_weights(kind: Any, config: Any) -> Any:
    import torch

    capped = any(_softcap(c) for c in (config, getattr(config, "text_config", None)))
    if capped:
        # transformers' sdpa attention drops the cap without a word; only its eager attention is a reference.
        config._attn_implementation = "eager"
    for part in (config, getattr(config, "text_config", None)):
        # Not every forward has an argument for it.
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if kind._can_set_experts_implementation():
        # grouped_mm, the default, reads counts on the host where it is traced in fp32: no graph can repeat that.
        config._experts_implementation = EXPERTS
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point():
                continue
            if p.dim() > 1:
                # At the usual scale of initialisation attention and positions hardly matter.
                p.copy_(torch.randn_like(p) * min(0.3, 1.5 / math.sqrt(p.shape[-1])))
            elif name.endswith("bias"):
                p.copy_(torch.randn_like(p) * 0.1)
            elif name.endswith("weight"):
                p.copy_(torch.randn_like(p) * 0.1 + 1.0)
            else:
                p.add_(torch.randn_like(p) * 0.3)
    return model


def _has_experts(model: Any) -> bool:
    return any(hasattr(m, "apply_gate") or type(m).__name__.endswith("Experts") for m in model.modules())


def _softcap(config: Any) -> bool:
    return bool(getattr(config, "attn_logit_softcapping", None))


def _first_call(model: Any) -> None:
    import torch

    with torch.no_grad():
        out = rows_of(model(**with_decoder(model, _tokens((9,), "dense", 0)), **without_cache(model)))
    if out.dim() != 3 or out.shape[:2] != (1, 9):
        raise ValueError(f"its output has shape {list(out.shape)} for [1, 9] tokens")
    if not torch.isfinite(out).all():
        raise ValueError("its own output is not finite")


def without_cache(model: Any) -> dict[str, bool]:
    """Arguments that keep a model from making a KV cache."""
    import inspect

    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def with_decoder(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The call, and of a model that has an encoder beside its decoder the same tokens for that."""
    import inspect

    names = inspect.signature(model.forward).parameters
    if not getattr(model.config, "is_encoder_decoder", False) or "decoder_input_ids" not in names:
        return inputs
    decoder = {"decoder_input_ids": inputs["input_ids"]}
    if "attention_mask" in inputs and "decoder_attention_mask" in names:
        decoder["decoder_attention_mask"] = inputs["attention_mask"]
    return inputs | decoder


def rows_of(output: Any) -> Any:
    """The output that has a row for each token."""
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output[0]


def _tokens(lengths: tuple[int, ...], kind: str, seed: int) -> dict[str, Any]:
    """The arguments of a padded or dense call; of a packed one, one row with all requests."""
    import torch

    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(4, VOCABULARY - 16, (n,), generator=g) for n in lengths]
    if kind == "packed":
        return {"input_ids": torch.cat(ids)[None]}
    if kind == "dense":
        return {"input_ids": torch.stack(ids)}
    width = max(lengths)
    padded, mask = torch.zeros(len(ids), width, dtype=torch.long), torch.zeros(len(ids), width, dtype=torch.long)
    for row, x in enumerate(ids):
        at = slice(0, len(x)) if kind == "right" else slice(width - len(x), width)
        padded[row, at], mask[row, at] = x, 1
    return {"input_ids": padded, "attention_mask": mask}


def _expected(eager: Any, kind: str, lengths: tuple[int, ...], inputs: dict[str, Any], more: dict[str, Any]) -> Any:
    """Eager's rows at the real tokens: ``[tokens, width]``; packed requests are called one by one."""
    import torch

    if kind != "packed":
        return _real(rows_of(eager(**inputs, **more)), inputs)
    alone = [with_decoder(eager, {"input_ids": x}) for x in inputs["input_ids"].split(list(lengths), 1)]
    return torch.cat([rows_of(eager(**x, **more))[0] for x in alone])


def _real(rows: Any, inputs: dict[str, Any]) -> Any:
    mask = inputs.get("attention_mask")
    return rows.flatten(0, 1) if mask is None else rows[mask.bool()]


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
        inputs = with_decoder(model, _tokens(lengths, kind, seed))
        with torch.no_grad():
            try:
                want = _expected(eager, kind, lengths, inputs, more)
            except Exception as e:
                # Not a call that this model can make: nothing to compare with.
                _note(result, f"eager cannot do {what}: {in_short(e)}")
                continue
            result.calls += 1
            before = fgc.report(model)
            batch = fgc.PrefillBatch(list(lengths), device="cpu") if kind == "packed" else nullcontext()
            try:
                with batch:
                    got = _real(rows_of(model(**inputs, **more)), inputs)
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
