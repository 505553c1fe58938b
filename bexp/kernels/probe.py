"""Finds out whether a kernel runs by running it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch


def failure_of(run: Callable[[], torch.Tensor], device: torch.device) -> str | None:
    """Run a small forward and backward; null if both work, else why not, in one line.

    torch warns of every reason for which it refuses a fused kernel, and the last warning says more than the error.
    """
    with warnings.catch_warnings(record=True) as caught, torch.enable_grad():
        warnings.simplefilter("always")
        try:
            out = run()
            out.backward(torch.ones_like(out))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            reasons = [str(w.message) for w in caught if "because" in str(w.message)] or [str(error)]
            return reasons[-1].strip().splitlines()[0].split(" (Triggered internally")[0]
    return None
