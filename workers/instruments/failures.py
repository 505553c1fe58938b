"""The outcome of an exception inside a trial."""

from __future__ import annotations

import torch

from bexp.explorer.records.measurement import Outcome
from bexp.out_of_memory import is_out_of_memory

UNSERVED = ("no available kernel", "invalid backend")
"""torch's messages if the pinned attention back end cannot serve the arguments."""


class UnsupportedTrialError(Exception):
    """This device or this software cannot run the trial; the message says why."""


class TrialFailedError(Exception):
    """A trial that failed in another process, which has said how; the message says why."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class TargetKilledError(TrialFailedError):
    """A target's process was ended by a signal, and nothing says why: it may have been somebody else's doing."""


def classify(error: Exception) -> tuple[Outcome, str]:
    """Return the outcome and the reason, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UnsupportedTrialError):
        return Outcome.UNSUPPORTED, text
    if isinstance(error, TrialFailedError):
        return error.outcome, text
    if is_out_of_memory(error):
        return Outcome.OUT_OF_MEMORY, _first_sentences(text, 3)
    if any(words in text.lower() for words in UNSERVED):
        return Outcome.UNSUPPORTED, _first_sentences(text, 3)
    return Outcome.CRASHED, f"{type(error).__name__}: {_first_sentences(text, 4)}"


def is_poisoned(device: torch.device) -> bool:
    """Return whether the device is lost to this process, as after any CUDA error but a lack of memory."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _first_sentences(text: str, count: int) -> str:
    return ". ".join(text.split(". ")[:count]).rstrip(".")
