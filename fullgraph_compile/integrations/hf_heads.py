"""What the heads of transformers do with hidden states, by the names of their classes."""

from __future__ import annotations

from torch import nn

# Heads that read one row of each request.
_POOLING = ("SequenceClassification", "MultipleChoice", "NextSentence", "ForPreTraining")
# Heads that work row by row beside those that make logits of a vocabulary.
_ROW_BY_ROW = ("ForTokenClassification", "ForQuestionAnswering", "ForQuestionAnsweringSimple")
# Heads whose labels are those of their own positions.
_LABELS_IN_PLACE = ("TokenClassification", "MaskedLM", "ForPreTraining")


def pools(name: str) -> bool:
    """Whether such a head reads one row of each request."""
    return any(part in name for part in _POOLING)


def compares_columns(name: str) -> bool:
    """Whether such a head, or whoever reads its logits, compares all columns of a padded batch with each other."""
    return "QuestionAnswering" in name


def shifts_labels(name: str) -> bool:
    """Whether a label may be that of the position before it."""
    return not any(part in name for part in _LABELS_IN_PLACE)


def keeps_rows(whole: nn.Module) -> bool:
    """Whether a model's head takes each row by itself."""
    while (base := getattr(whole, "get_base_model", None)) is not None and base() is not whole:
        whole = base()
    kind = type(whole)
    if not kind.__module__.startswith("transformers."):
        return False
    head = getattr(whole, "get_output_embeddings", lambda: None)()
    return head is not None or kind.__name__.endswith((*_ROW_BY_ROW, "Model"))
