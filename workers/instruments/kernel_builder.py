"""The process that builds expert kernels, while the profiler imports and checks what needs none of them."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from bexp import kernels
from bexp.child_process import module_command
from bexp.kernels.builds import Experts, Order
from bexp.measure.host_limits import usable_cores
from bexp.private_files import private
from bexp.targets.registry import version_of

CACHE = "TRITON_CACHE_DIR"
FEWEST_CORES = 4
"""With fewer, building side by side delays what it runs next to by as much as it saves."""
KEPT_CORES = 2
PATIENCE_SECONDS = 60.0
"""The longest wait for kernels. What is not built then, its first user builds."""


class KernelBuilder:
    """At most one process that builds for a job. Where it cannot help, all methods do nothing.

    `start` may come before it is known what is to be built, because the process imports torch first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        self._done: Path | None = None
        cores, folder = usable_cores(), os.environ.get(CACHE)
        can_build = device.type == "cuda" and find_spec("triton") is not None and cores >= FEWEST_CORES
        self._folder = Path(folder) if folder and can_build else None
        self._processes = cores - KEPT_CORES

    def start(self) -> None:
        """Start the process, which waits for an order."""
        if self._folder is None or self._process is not None:
            return
        with suppress(OSError):
            self._process = subprocess.Popen(
                module_command("bexp.kernels.builds"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )

    def order(self, experts: Sequence[Experts]) -> None:
        """Have kernels built for experts, unless this was done before with the same code and compilers."""
        if self._folder is None:
            return
        properties = torch.cuda.get_device_properties(self._device)
        capability = (properties.major, properties.minor)
        order = Order(tuple(experts), capability, properties.multi_processor_count, processes=0)
        self._done = self._folder / f"bexp-{_digest(order)}.built"
        if not experts or self._done.exists():
            self.close()
            return
        self.start()
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError), self._process.stdin as stdin:
                stdin.write(replace(order, processes=self._processes).encode().encode())

    def wait(self) -> None:
        """Wait until the kernels are built, or cannot be."""
        if self._process is None or self._done is None:
            return
        with suppress(subprocess.TimeoutExpired, OSError):
            if self._process.wait(PATIENCE_SECONDS) == 0:
                with open(self._done, "w", opener=private):
                    pass
        self.close()

    def close(self) -> None:
        """End the process, with which those end that it has forked."""
        process, self._process, self._done = self._process, None, None
        if process is None:
            return
        process.kill()
        process.wait()
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()


def _digest(order: Order) -> str:
    """Identify what is built: the order, the kernels' code, and the versions of what compiles it."""
    found = hashlib.sha256(f"{order.encode()} {torch.__version__} {version_of('triton')}".encode())
    for path in _sources(Path(folder) for folder in kernels.__path__):
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


def _sources(folders: Iterable[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))
