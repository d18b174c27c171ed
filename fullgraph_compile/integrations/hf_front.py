"""How a transformers model is called, and how a call of it is one packed row."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fullgraph_compile.batch import PrefillBatch
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations import hf_cache
from fullgraph_compile.integrations.hf_back import Back
from fullgraph_compile.integrations.hf_facts import padding_id
from fullgraph_compile.integrations.hf_positions import as_padded, packed_positions
from fullgraph_compile.integrations.hf_spans import spans_and_batch
from fullgraph_compile.integrations.packing import Packing
from fullgraph_compile.integrations.plain import AsGiven, Bound, NotServed, OneRow
from fullgraph_compile.integrations.read_padding import ReadPositions, real_positions
from fullgraph_compile.whole_model import given_labels

if TYPE_CHECKING:
    from fullgraph_compile.integrations.transformers import TransformersModule

# What a model takes and a prefill has no use for: where in the cache the tokens go.
_IGNORED = ("cache_position",)
# What a head passes on to its body with all else that it does not name, and only its loss reads: ``Trainer.evaluate``
# gives the first with every batch.
_OF_THE_LOSS = frozenset({"num_items_in_batch", "ignore_index", "shift_labels"})
# Arguments that are looked at here, where None is nothing.
_READ = frozenset({"input_ids", "inputs_embeds", "position_ids", "use_cache", "return_dict", "labels", *hf_cache.NAMES})


class Reading:
    """What a call means as far as it follows from the names of its arguments, and from those that are no tensors.

    It serves each call that has the same of both: what is in the tensors, and the batch, are looked at by ``bind``.

    Args:
        front: the model.
        given: the arguments by name.

    Raises:
        NotServed: such calls must run as they are.
    """

    def __init__(self, front: TransformersModule, given: dict[str, Any]) -> None:
        self.front = front
        ignored = (*_IGNORED, *_OF_THE_LOSS.difference(front.names))
        call = {k: v for k, v in given.items() if not (k in ignored or (v is None and _nothing(k, front)))}
        dicts = getattr(front.module.config, "return_dict", True)
        if "return_dict" in given and given["return_dict"] is None and not dicts:
            raise NotServed(Reason.ARGUMENTS, "return_dict is None, and False in the config")
        self.dicts = call.pop("return_dict", dicts) is not False
        attentions = call.get("output_attentions", getattr(front.module.config, "output_attentions", False))
        for name, value in (("labels", call.get("labels")), ("output_attentions", attentions)):
            if value is not None and value is not False:
                raise NotServed(Reason.ARGUMENTS, f"{name} is given")
        call.pop("attention_mask", None)
        self.decoder_mask = _take_decoder_mask(call)
        self.makes_cache, self.cache_name = self._take_cache(call)
        leads = [n for n in ("input_ids", "inputs_embeds") if n in call]
        if len(leads) != 1 or not isinstance(call[leads[0]], Tensor):
            raise NotServed(Reason.ARGUMENTS, "give exactly one of input_ids and inputs_embeds")
        self.lead = leads[0]
        front.check_lead(self.lead)
        call.pop("position_ids", None)
        # The lead first: it tells the token count, of which a decoder may have another.
        names = [name for name, value in call.items() if isinstance(value, Tensor)]
        self.tensors = tuple(sorted(names, key=lambda name: name != self.lead))
        self.constants = {name: value for name, value in call.items() if name not in self.tensors}

    def _take_cache(self, call: dict[str, Any]) -> tuple[bool, str | None]:
        """Whether the call fills a cache, and the name of the one that is given; in the call, ``use_cache`` says so."""
        given = [name for name in hf_cache.NAMES if call.pop(name, None) is not None]
        if len(given) > 1:
            raise NotServed(Reason.ARGUMENTS, f"both {' and '.join(hf_cache.NAMES)} are given")
        wanted = call.pop("use_cache", None)
        if "use_cache" not in self.front.names:
            if given:
                raise NotServed(Reason.ARGUMENTS, "a cache is given")
            return False, None
        wanted = getattr(self.front.module.config, "use_cache", False) if wanted is None else wanted
        made = self.front.facts.cache if self.front.facts is not None else None
        call["use_cache"] = bool(given or (wanted and made is not None))
        return call["use_cache"], given[0] if given else None

    def bind(self, given: dict[str, Any], active: PrefillBatch | None) -> Bound:
        """The call as one packed row, the batch that it is for, and the way back.

        Args:
            given: the arguments by name.
            active: the batch that the caller is inside of.

        Raises:
            NotServed: the call must run as it is.
            ValueError: the batch, or the positions, do not describe the call.
        """
        front, tokens, mask = self.front, given[self.lead], given.get("attention_mask")
        if self.decoder_mask is not None:
            _check_decoder_mask(given[self.decoder_mask], mask)
        cache = self._cache(given)
        if tokens.dim() != (2 if self.lead == "input_ids" else 3):
            one_row = tokens.dim() == (1 if self.lead == "input_ids" else 2)
            hint = f"; one packed row is {self.lead}[None]" if one_row else ""
            raise NotServed(Reason.ARGUMENTS, f"{self.lead} has shape {tuple(tokens.shape)}{hint}")
        rows, columns = tokens.shape[:2]
        pools = front.facts is not None and front.facts.pooler is not None
        if not rows or (pools and not columns):
            raise NotServed(Reason.EMPTY, f"{self.lead} has shape {tuple(tokens.shape)}")
        device = tokens.device
        positions = as_padded(given.get("position_ids"), rows, columns)

        read, on_host, reads = self._read(given), mask, 0
        on_device = isinstance(mask, Tensor) and mask.device.type != "cpu" and mask.shape == (rows, columns)
        if read is not None and active is None and on_device:
            # With the mask, which is read anyway.
            read, on_host, reads = read.on_host(mask)
        spans, batch, read_now = spans_and_batch(front, rows, columns, on_host, positions, active, device)
        reads += read_now
        packing = Packing(spans, device, mask if isinstance(mask, Tensor) else None)
        several = active.new_tokens if rows == 1 and active is not None and active.requests > 1 else ()
        if several and active is not None:
            front.check_requests(active)
        if not packing.dense:
            reads += self._check_padding(packing, read, on_host)
        call = self.constants.copy()
        for name in self.tensors:
            call[name] = given[name] if packing.trivial else _packed(name, given[name], packing)
        ids = tokens if self.lead == "input_ids" else None
        made = packed_positions(front, ids, positions, packing, batch, active)
        if made is not None:
            call["position_ids"] = made
        if cache is not None and batch.requests > rows:
            # Of a batch; positions that begin anew mean nothing to a model that fills a cache.
            raise NotServed(
                Reason.ARGUMENTS, "use_cache is on, but a packed batch leaves no cache: give use_cache=False"
            )
        back = Back(front, packing, cache, self.dicts, several)
        by_ids = positions is None and front.facts is not None and front.facts.positions == "ids"
        padded = not packing.trivial
        again: Any = self.bind
        # What is in a mask is looked at each time.
        no_mask = mask is None and self.decoder_mask is None
        if packing.trivial and no_mask and back.nothing and not by_ids:
            taken = self.tensors if positions is None else (*self.tensors, "position_ids")
            of_batch = made is not None and positions is None
            as_given = AsGiven(self.constants, taken, of_batch, None if front.keeps_rows else front.check_requests)
            if active is not None:
                again = as_given
            elif positions is None and (made is None or made is batch.row_of_positions):
                again = OneRow(self.lead, as_given, self.bind)
        return Bound(call, batch, None if back.nothing else back, reads, padded, not packing.dense, again)

    def _cache(self, given: dict[str, Any]) -> Any:
        """The empty cache that a call fills, or None."""
        if not self.makes_cache:
            return None
        cache = hf_cache.fresh_cache(self.cache_name and given[self.cache_name], self.front.module)
        made = self.front.facts.cache if self.front.facts is not None else None
        if made is not None and made is not hf_cache.DynamicCache:
            raise NotServed(Reason.ARGUMENTS, f"use_cache is on, and {self.front.name} makes a {made.__name__}")
        return cache

    def _read(self, given: dict[str, Any]) -> ReadPositions | None:
        """Which positions a head and a loss read, where the call's tensors are."""
        front, tokens = self.front, given[self.lead]
        shifted = given.get("shift_labels")
        labels = given_labels.get() if shifted is None else shifted
        pools = front.reads_last_token
        a_loss = isinstance(labels, Tensor) and labels.shape == tokens.shape[:2]
        if not (pools or a_loss):
            return None
        read = ReadPositions(front.name, padding_id(front.module))
        if pools:
            if tokens.dim() == 3:
                read = replace(read, last_column="is given no ids")
            elif read.padding < 0:
                read = replace(read, last_column="has no pad_token_id")
            else:
                read = replace(read, ids=tokens)
        if a_loss:
            shifts = shifted is None and front.shifts_labels
            read = replace(read, labels=labels, shifted=shifts, ignored=given.get("ignore_index", -100))
        return read

    def _check_padding(self, packing: Packing, read: ReadPositions | None, mask: Tensor | None) -> int:
        """How often the device was read.

        Raises:
            NotServed: the model makes something else of padding than a packed call can.
        """
        front = self.front
        if packing.spans.left and front.reads_first_column:
            raise NotServed(Reason.MASK, f"left padding, and {front.name} pools the first column, which is padding")
        if not self.decoder_mask and "decoder_input_ids" in front.names:
            raise NotServed(
                Reason.MASK, "attention_mask without decoder_attention_mask: the decoder has no padding there"
            )
        if front.compares_columns:
            raise NotServed(Reason.MASK, f"padding, and {front.name} compares all columns, those that are padding too")
        if read is None:
            return 0
        read, mask, reads = read.on_host(mask)
        read.check(real_positions(mask, packing.spans.lengths, packing.columns))
        return reads


def _nothing(name: str, front: TransformersModule) -> bool:
    """Whether an argument that is None is as if it were not given; if not, it may take the place of the config's."""
    return name in front.optional or name in _READ or "mask" in name


def _take_decoder_mask(call: dict[str, Any]) -> str | None:
    """Take the decoder's mask out of the call: its name, if it is given.

    Raises:
        NotServed: there is another mask; attention that is the op would know nothing of it.
    """
    others = [name for name in call if "mask" in name]
    for name in others:
        if name != "decoder_attention_mask":
            raise _other_mask(name)
        del call[name]
    return others[0] if others else None


def _check_decoder_mask(value: Any, mask: Any) -> None:
    """Raise ``NotServed`` unless the decoder's mask says the same as ``attention_mask``."""
    same = value is mask
    if not same and isinstance(value, Tensor) and value.device.type == "cpu":
        if mask is None:
            same = value.dim() == 2 and bool((value == 1).all())
        elif isinstance(mask, Tensor) and mask.device.type == "cpu":
            same = value.shape == mask.shape and bool((value.bool() == mask.bool()).all())
    if not same:
        raise _other_mask("decoder_attention_mask")


def _other_mask(name: str) -> NotServed:
    return NotServed(Reason.MASK, f"{name} is given, which is neither attention_mask nor the same for a decoder")


def _packed(name: str, value: Tensor, packing: Packing) -> Tensor:
    shape = value.shape
    if len(shape) >= 2 and shape[1] == packing.columns and shape[0] in (1, packing.rows):
        return packing.pack(value if shape[0] == packing.rows else value.expand(packing.rows, *shape[1:]))
    padded = (packing.rows, packing.columns)
    raise NotServed(Reason.ARGUMENTS, f"{name} has shape {tuple(shape)}, but the padded batch has {padded}")
