"""The ranks that share the sequences of a block or of a model."""

from __future__ import annotations

from bexp.explorer.model.model import ModelSpec
from bexp.kernels.context_parallel.attention import ContextParallel, context_parallel_reason
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.instruments.kernel_shapes import attention_shape


def find_ring(
    instruments: Instruments, model: ModelSpec, size: int, layout: str | None, backend: str | None
) -> ContextParallel | None:
    """The ring of this rank; None if there is no layout, because components without one need no other rank.

    Raises:
        UnsupportedTrialError: the sequences cannot be shared by so many, or not with this attention back end.
    """
    reason: str | None = None
    if model.seq_length % size:
        reason = f"{size} devices cannot share sequences of {model.seq_length} tokens equally"
    elif layout is not None:
        assert backend is not None, "attention has a back end"
        try:
            reason = context_parallel_reason(attention_shape(model), size, layout, backend, instruments.device)
        except ValueError as error:
            reason = str(error)
    if reason is not None:
        raise UnsupportedTrialError(reason)
    return None if layout is None else instruments.rank_group.context_parallel(size, layout)
