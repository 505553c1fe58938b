"""Finds out whether a kernel works on this device, by running it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from bexp.out_of_memory import is_out_of_memory


def failure_of(run: Callable[[], torch.Tensor], device: torch.device) -> str | None:
    """Run a small forward and backward; return None if both work, else the reason in one line.

    torch issues a warning for every reason to refuse a fused kernel. The last warning says more than the error.

    A lack of memory is raised: it says nothing about the kernel, and may be over at the next call.
    """
    with warnings.catch_warnings(record=True) as caught, torch.enable_grad():
        warnings.simplefilter("always")
        try:
            out = run()
            out.backward(torch.ones_like(out))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            reasons = [str(w.message) for w in caught if "because" in str(w.message)] or [str(error)]
            return reasons[-1].strip().splitlines()[0].split(" (Triggered internally")[0]
    return None
