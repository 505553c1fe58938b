"""What a model is given in training: how long its sequences are, and whether they are padded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bexp.trainer.recommended_setup import RecommendedSetup

_FLATTENED = ("position_ids", "cu_seq_lens_q")
"""Arguments of a forward pass that tell documents apart in one row, whose width says nothing of their length."""


class SeenBatches:
    """Notes the micro-batches of a model in training, by their shapes; the first one's mask is read as well.

    `longest` is the largest number of tokens in a sequence, 0 before the first micro-batch. `padded` says whether the
    first one was padded, None if that is not known: one sequence without padding may be one of unequal length.
    """

    def __init__(self) -> None:
        self.longest = 0
        self.padded: bool | None = None
        self._hook: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Note what `model` is given from now on."""
        self._hook = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def stop(self) -> None:
        """Note nothing more."""
        if self._hook is not None:
            self._hook.remove()

    def padding_difference(self, setup: RecommendedSetup) -> Iterator[str]:
        """Yield that these micro-batches are padded where the measured ones were not, or the reverse."""
        if self.padded is None or setup.batching is None:
            return
        if self.padded != (setup.batching in ("padded", "grouped")):
            seen, measured = ("padded", "whole") if self.padded else ("whole", "padded")
            yield f"{seen} sequences, not {measured} ones"

    def _note(self, model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        tokens = given.get("input_ids", args[0] if args else None)
        if (
            not model.training
            or not isinstance(tokens, Tensor)
            or any(given.get(name) is not None for name in _FLATTENED)
        ):
            return
        if not self.longest:
            mask = given.get("attention_mask")
            has_gaps = isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())
            self.padded = has_gaps or (None if tokens.numel() == tokens.shape[-1] else False)
        self.longest = max(self.longest, tokens.shape[-1])
