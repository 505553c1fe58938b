"""What one profiler process and its spare leave behind, without starting any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bexp.workers.devices.lock import DeviceLocks
from bexp.workers.process.device_process import DeviceProcess
from bexp.workers.process.interface import ProfilerError


class Unending:
    """A process that does not end."""

    def end(self, grace_seconds: float) -> int:
        raise TimeoutError("it hangs")


def test_a_spare_that_does_not_end_keeps_nothing_else_open(tmp_path: Path) -> None:
    locks = DeviceLocks(["cpu"], directory=tmp_path)
    process = DeviceProcess(
        ["cpu"], locks, environment={}, on_wait=None, lock_timeout_seconds=0.1, start_timeout_seconds=1.0
    )
    assert locks.acquire(timeout_seconds=0.1)
    ended: list[float] = []

    class Ending:
        def end(self, grace_seconds: float) -> int:
            ended.append(grace_seconds)
            return 0

    spare: Any = Unending()
    current: Any = Ending()
    process._spare, process.current = spare, current
    with pytest.raises(ProfilerError, match="it hangs"):
        process.close()
    assert (len(ended), process.current) == (1, None)
    assert DeviceLocks(["cpu"], directory=tmp_path).acquire(timeout_seconds=0.1)
    process.close()
