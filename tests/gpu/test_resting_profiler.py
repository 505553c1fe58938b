"""What an idle worker's profiler holds of a CUDA device."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from bexp.workers.devices.discovery import device_key, open_gpu
from bexp.workers.devices.lock import DeviceLocks
from bexp.workers.process.profiler import Profiler
from tests.gpu.needs import visible
from tests.waits import wait_until

pytestmark = visible(1)

CONTEXT_BYTES, TOLERATED_BYTES = 100 << 20, 16 << 20
"""A process that has opened the device takes more than the first, and nobody takes the second meanwhile."""


def is_idle(process: psutil.Process) -> bool:
    before = process.cpu_times()
    time.sleep(2.0)
    return process.cpu_times() == before


def test_a_profiler_at_rest_holds_nothing_of_the_device_and_its_spare_takes_it_again(tmp_path: Path) -> None:
    gpu = open_gpu("cuda:0", os.environ)
    assert gpu is not None
    free = gpu.used_bytes()
    assert free is not None
    with Profiler("cuda:0", lock_directory=tmp_path) as profiler:
        assert (gpu.used_bytes() or 0) - free > CONTEXT_BYTES
        profiler.rest()
        spare = profiler._process._spare
        assert spare is not None
        wait_until(lambda: is_idle(psutil.Process(spare.pid)))  # it has imported what a job may need
        assert (gpu.used_bytes() or 0) - free < TOLERATED_BYTES
        other = DeviceLocks([device_key("cuda:0", os.environ)], directory=tmp_path)
        other.try_acquire()
        other.release()
        profiler.start()
        assert profiler.pid == spare.pid
        assert profiler.hardware().device_kind == "cuda"
