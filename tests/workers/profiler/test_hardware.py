from __future__ import annotations

import pytest
import torch

from bexp.workers.profiler import hardware

GIB = 2**30
DEVICE = torch.device("cuda:0")
KEPT_BY_DRIVER = GIB // 2


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which another process has 3 and this one 2 in its context and 1 in its allocator."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (74 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: GIB)
    monkeypatch.setattr(hardware, "used_bytes", lambda _: KEPT_BY_DRIVER + 6 * GIB)


def test_memory_that_the_driver_keeps_is_not_subtracted_twice() -> None:
    assert hardware.cuda_memory(DEVICE, KEPT_BY_DRIVER + 3 * GIB) == (80 * GIB, 77 * GIB, 2 * GIB)


def test_without_nvml_all_memory_in_use_counts_as_the_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.cuda_memory(DEVICE, None) == (80 * GIB, 80 * GIB, 5 * GIB)
    monkeypatch.setattr(hardware, "used_bytes", lambda _: None)
    assert hardware.cuda_memory(DEVICE, 3 * GIB) == (80 * GIB, 80 * GIB, 5 * GIB)
