from __future__ import annotations

import torch

from bexp.workers.instruments.back_ends import report_device
from tests.contracts.samples import make_report
from tests.workers.profiler.samples import MODEL


def test_a_report_says_which_attention_serves_sequences_that_devices_share() -> None:
    report = report_device(MODEL, make_report().hardware, torch.device("cpu"))
    found = {backend.name: backend for backend in report.attention_backends}
    assert found["flash"].context_parallel
    assert found["math"].context_parallel
    for backend in found.values():
        assert backend.context_parallel is (backend.context_parallel_reason is None)
        if not backend.usable:
            assert backend.context_parallel_reason == backend.reason
    assert "no attention back end 'efficient'" in str(found["efficient"].context_parallel_reason) or (
        not found["efficient"].usable
    )
