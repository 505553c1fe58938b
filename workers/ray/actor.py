"""An actor on a node of the cluster: a profiler of the devices that Ray gave to it."""

from __future__ import annotations

import importlib
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.process.interface import DeviceProfiler
from bexp.workers.process.profiler import Profiler

OpenProfiler = Callable[[Sequence[str], Mapping[str, str], Path | None], DeviceProfiler]
"""Makes a profiler from its devices, its environment, and the folder of its device locks (None: the host's)."""


def open_profiler(devices: Sequence[str], environment: Mapping[str, str], locks: Path | None) -> DeviceProfiler:
    """Make a profiler of real devices."""
    return Profiler(devices, environment=environment, lock_directory=locks)


class Actor:
    """An actor that runs one trial at a time, with a profiler process that stays between trials.

    Messages are JSON, as in the database. A GPU is locked on its host as usual. Ray gives each actor one CPU. So a CPU
    profiler runs one thread, and has a lock of its own, for which no other actor waits.
    """

    def __init__(self, devices: tuple[str, ...], open_profiler: OpenProfiler) -> None:
        environment = dict(os.environ)  # with the CUDA_VISIBLE_DEVICES that Ray has set for this actor
        self._locks: tempfile.TemporaryDirectory[str] | None = None
        if devices[0] == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
            self._locks = tempfile.TemporaryDirectory(prefix="bexp-actor-")
        self._profiler = open_profiler(devices, environment, Path(self._locks.name) if self._locks else None)

    def introduce(self) -> tuple[str, str]:
        """Start the profiler and measure its device; return the node's name with its id, and a `HardwareSpec`."""
        ray: Any = importlib.import_module("ray")
        self._profiler.start()
        node = f"{socket.gethostname()} ({ray.get_runtime_context().get_node_id()[:8]})"
        return node, self._profiler.hardware().model_dump_json()

    def begin(self, request: str) -> str:
        """Announce a job; return a `DeviceReport`."""
        return self._profiler.begin(ExplorationRequest.model_validate_json(request)).model_dump_json()

    def measure(self, task: str) -> tuple[str, int]:
        """Run a trial; return a `Measurement`, and how often the profiler process has been replaced so far."""
        measurement = self._profiler.measure(TrialTask.model_validate_json(task))
        return measurement.model_dump_json(), self._profiler.restarts

    def close(self) -> None:
        """End the profiler process."""
        self._profiler.close()
        if self._locks is not None:
            self._locks.cleanup()
