import pytest
import torch

from bexp.explorer.records.measurement import Outcome
from bexp.workers.instruments.failures import UnsupportedTrialError, classify


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (MemoryError(), Outcome.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), Outcome.OUT_OF_MEMORY),
        (RuntimeError("std::bad_alloc"), Outcome.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Outcome.CRASHED),
        (ValueError("no such thing"), Outcome.CRASHED),
        (UnsupportedTrialError("no compiler"), Outcome.UNSUPPORTED),
    ],
)
def test_what_an_exception_means(error: Exception, outcome: Outcome) -> None:
    found, reason = classify(error)
    assert found is outcome
    assert reason
    assert "\n" not in reason


def test_what_torch_says_when_the_host_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert classify(caught.value)[0] is Outcome.OUT_OF_MEMORY
