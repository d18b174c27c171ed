"""What the heads of transformers do with hidden states, by the names of their classes."""

from __future__ import annotations

from torch import nn

# Heads that read one row of each request.
_POOLING = ("SequenceClassification", "MultipleChoice", "NextSentence", "ForPreTraining")
# Heads that work row by row beside those that make logits of a vocabulary.
_ROW_BY_ROW = ("ForTokenClassification", "ForQuestionAnswering", "ForQuestionAnsweringSimple")
# Heads whose labels are those of their own positions.
_LABELS_IN_PLACE = ("TokenClassification", "MaskedLM", "ForPreTraining")


def names_above(whole: nn.Module, body: nn.Module) -> tuple[str, ...]:
    """The classes of the modules that the body is a part of: a head may be wrapped once more, by an adapter's model or
    by sentence-transformers."""
    return tuple(type(m).__name__ for m in whole.modules() if m is not body and any(x is body for x in m.modules()))


def pools(names: tuple[str, ...]) -> bool:
    """Whether one of such heads reads one row of each request."""
    return any(part in name for name in names for part in _POOLING)


def compares_columns(names: tuple[str, ...]) -> bool:
    """Whether one of such heads, or whoever reads its logits, compares all columns of a padded batch."""
    return any("QuestionAnswering" in name for name in names)


def shifts_labels(names: tuple[str, ...]) -> bool:
    """Whether a label may be that of the position before it."""
    return not any(part in name for name in names for part in _LABELS_IN_PLACE)


def keeps_rows(whole: nn.Module) -> bool:
    """Whether a model's head takes each row by itself."""
    while (base := getattr(whole, "get_base_model", None)) is not None and base() is not whole:
        whole = base()
    kind = type(whole)
    if not kind.__module__.startswith("transformers."):
        return False
    head = getattr(whole, "get_output_embeddings", lambda: None)()
    return head is not None or kind.__name__.endswith((*_ROW_BY_ROW, "Model"))
