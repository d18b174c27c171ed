"""Whether transformers' model means by its attention calls what the op computes: small calls of it, compared."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullgraph_compile.batch import PrefillBatch, no_active_batch
from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations import hf_facts, hf_masks
from fullgraph_compile.integrations.hf_attention import counting_sites
from fullgraph_compile.integrations.hf_facts import REAL, allowed, error, leading
from fullgraph_compile.integrations.plain import NotServed, device_of
from fullgraph_compile.integrations.refusing import raised_in, refusing
from fullgraph_compile.report import log

if TYPE_CHECKING:
    from fullgraph_compile.integrations.transformers import TransformersModule

# Layers that carry a state from token to token, by the names that transformers gives them.
_RECURRENT = re.compile(
    r"Mamba\w*Mixer|(Bamba|FalconH1)Mixer|MambaLayer|DeltaNet|DeltaAttention|LightningAttention|RecurrentBlock"
)


class Checks:
    """Compares a model with itself, by small calls of our own.

    Args:
        front: the model, as calls of it are understood.
    """

    def __init__(self, front: TransformersModule) -> None:
        self.front = front

    def check_trace(
        self,
        call: dict[str, Any],
        traced: Callable[[dict[str, Any]], Any],
        lengths: tuple[int, ...],
        *,
        strict: bool,
    ) -> bool:
        """What ``PlainModule.check_trace`` says, by small calls of each of the lengths."""
        calls = [self.small_call(call, n) for n in lengths]
        device = device_of(call)
        with torch.no_grad(), no_active_batch(), refusing(Reason.ATTENTION):
            alone = self._alone(calls)
            with PrefillBatch(lengths, device=device):
                out = traced(self._pack(calls) | {k: call[k] for k in ("use_cache",) if k in call})
        got = out[0] if call.get("use_cache") else out
        apart = error(leading(list(got.values()) if isinstance(got, dict) else got), alone)
        if strict and not apart <= allowed(alone):
            raise NotServed(
                Reason.ATTENTION,
                f"two packed requests differ from each alone by {apart:.2g} of the largest value in what was traced of "
                f"{self.front.name}",
            )
        return apart <= allowed(alone)

    def check_op(self, call: dict[str, Any]) -> None:
        """Two short packed requests through the op, against the user's own attention, each alone."""
        lengths = (REAL, 4)
        calls = [self.small_call(call, n) for n in lengths]
        device = device_of(call)
        sites: list[str] = []
        with torch.no_grad(), no_active_batch(), refusing(Reason.ATTENTION):
            got = self._with_op(self._pack(calls), lengths, sites)
            self._check_sites(sites)
            # Some of transformers' implementations drop what others compute (sdpa: the soft cap), so the model's
            # eager attention is a second opinion.
            wants = [self._alone(calls)]
            packed = error(got, wants[0])
            if not packed <= allowed(got):
                with self.front.attention("eager"):
                    wants.append(self._alone(calls))
            errors = [error(got, want) for want in wants]
            if not min(errors) <= allowed(got):
                if found := self.recurrent():
                    raise NotServed(
                        Reason.ATTENTION,
                        f"{self.front.name} has recurrent layers ({found}): two packed requests differ from each alone "
                        f"by {packed:.2g} of the largest value",
                    )
                # Positions that the model counts itself, or a convolution over tokens, are right for one request.
                with self.front.attention():
                    got = torch.cat([self._through_op(c, n) for c, n in zip(calls, lengths, strict=True)], dim=1)
                errors = [error(got, want) for want in wants]
                self.front.one_request = True
        if not min(errors) <= allowed(got):
            raise NotServed(
                Reason.ATTENTION,
                f"two packed requests differ from each alone by {packed:.2g} of the largest value, and one through the "
                f"op from itself by {errors[0]:.2g}: {self.front.name} masks or mixes in a way that its attention "
                "calls do not say",
            )
        self._check_masks(calls[0], device)
        if not errors[0] <= allowed(got):
            log.info(
                "%s: replays equal its eager attention; the implementation that was set differs from that by %.2g",
                self.front.name,
                errors[0],
            )

    def _with_op(self, packed: dict[str, Any], lengths: tuple[int, ...], sites: list[str]) -> Tensor:
        """A packed call in which the op is the model's attention.

        Raises:
            NotServed: the model itself can make the call, but not so: then no mask is made for its attention.
        """
        device = device_of(packed)
        try:
            with self.front.attention(), counting_sites(sites), PrefillBatch(lengths, device=device):
                return leading(self.front.forward(**packed))
        except NotServed:
            raise
        except Exception as error:
            failed = error
        self.front.forward(**packed)
        raise NotServed(
            Reason.ATTENTION,
            f"{self.front.name} computes with the mask of its attention calls itself, and the op is given none: "
            f"{raised_in(failed)}",
        ) from failed

    def _check_masks(self, call: dict[str, Any], device: torch.device) -> None:
        """The masks that the model makes, at distances that small calls do not have."""
        with torch.no_grad(), no_active_batch(), hf_masks.keeping_masks() as masks:
            try:
                with self.front.attention(hf_masks.MASKS), PrefillBatch([REAL], device=device):
                    self.front.forward(**call)
            except Exception as error:
                # Its masks are no business of an implementation that it does not know: what was compared must do.
                log.info("%s: its masks could not be asked for: %s", self.front.name, error)
        hf_masks.check_masks(masks, self.front.name)

    def _check_sites(self, sites: list[str]) -> None:
        if not sites:
            raise NotServed(
                Reason.NO_SITES,
                f"{self.front.name} never calls transformers' attention interface, so its attention cannot be marked",
            )

    def recurrent(self) -> str:
        """The class of a layer that carries a state from token to token; no graph is proven of a scan over tokens, and
        tracing one takes minutes."""
        return next((type(m).__name__ for m in self.front.module.modules() if _RECURRENT.search(type(m).__name__)), "")

    # -- small calls ---------------------------------------------------------------------------------------------

    def small_call(self, call: dict[str, Any], tokens: int) -> dict[str, Any]:
        """The same kind of call with ``tokens`` tokens of one request, and all rows returned."""
        small: dict[str, Any] = {}
        dims = self.front.token_dims(call)
        for name, value in call.items():
            if name == "logits_to_keep":
                continue
            if name in ("input_ids", "inputs_embeds"):
                small[name] = hf_facts.small_tokens(self.front.module, name, value, tokens)
            elif name == "position_ids":
                small[name] = self._small_positions(value, tokens)
            elif name == "use_cache":
                small[name] = False
            elif name in dims:
                shape = list(value.shape)
                shape[dims[name]] = tokens
                small[name] = value.narrow(dims[name], 0, 1).expand(shape)
            else:
                small[name] = value
        return small

    def _small_positions(self, like: Tensor, tokens: int) -> Tensor:
        past = self.front.facts.padding + 1 if self.front.facts is not None else 0
        return (torch.arange(tokens, device=like.device) + past).expand(*like.shape[:-1], tokens)

    def _pack(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Calls of one request each, as one packed call."""
        dims = self.front.token_dims(calls[0])
        return {k: torch.cat([c[k] for c in calls], dim=dims[k]) if k in dims else v for k, v in calls[0].items()}

    def _alone(self, calls: list[dict[str, Any]]) -> Tensor:
        """Each request in a call of its own, rows put together."""
        return torch.cat([leading(self.front.forward(**c)) for c in calls], dim=1)

    def _through_op(self, call: dict[str, Any], tokens: int) -> Tensor:
        device = device_of(call)
        with PrefillBatch([tokens], device=device):
            return leading(self.front.forward(**call))
