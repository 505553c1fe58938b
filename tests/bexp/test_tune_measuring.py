"""The peaks of sizes that are measured one after the other in one process."""

from __future__ import annotations

import sys

import pytest
import torch

from bexp.tune.measuring import peak_bytes, reset_peak

CPU = torch.device("cpu")
LARGE = 100 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts nothing anew")
def test_a_size_has_a_peak_of_its_own_whatever_larger_ones_have_left_behind() -> None:
    reset_peak(CPU)
    before, _ = peak_bytes(CPU)
    texts = [bytes(4096) for _ in range(LARGE >> 12)]
    after_it = bytes(4096)  # so that the heap does not shrink by itself
    cycle: list[object] = [texts]
    cycle.append(cycle)
    del texts, cycle
    large, _ = peak_bytes(CPU)
    assert large - before > 0.9 * LARGE
    reset_peak(CPU)
    assert peak_bytes(CPU)[0] - before < 0.1 * LARGE
    assert after_it
