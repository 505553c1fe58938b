"""The check that a training micro-step was captured as CUDA graphs."""

from __future__ import annotations

import torch

from bexp.graphs.graphed_loss import GraphedLoss
from bexp.workers.instruments.failures import UnsupportedTrialError


def require_captured(loss: GraphedLoss) -> None:
    """Check that a micro-step that has run was captured.

    Raises:
        UnsupportedTrialError: it was not captured; the message says why.
        torch.OutOfMemoryError: memory ran out in the attempt.
    """
    if isinstance(loss.error, torch.OutOfMemoryError):
        raise loss.error
    if loss.problem is not None or not loss.num_captures:
        raise UnsupportedTrialError(f"the micro-step cannot be replayed as CUDA graphs: {loss.problem}")
