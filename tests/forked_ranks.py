"""Processes that share one import of torch, which takes longer than most of what they are tested for."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from bexp.workers.process.start import process_environment
from tests.chaos.fork_server import ForkServer

ROOT = Path(__file__).parents[1]
HAS_GPUS = Path("/dev/nvidiactl").exists()
"""Such a host imports before a fork only what is known to open no GPU: a process that has opened one must not fork."""
SHARDING = ("torch.distributed.fsdp", "torch._dynamo")
"""What torch imports once parameters are sharded."""
PROFILER = ("bexp.workers.profiler.device",)
GROUP = ("bexp.workers.profiler.distributed.coordinator", "bexp.workers.profiler.distributed.rank", *SHARDING)


def run_ranks(module: str, folder: Path, *arguments: str, seconds: float = 500.0) -> None:
    """Run `module`, which hands its ranks to `fork_ranks`, on `folder`.

    Raises AssertionError, with what the ranks printed, if one of them fails or they take longer than `seconds`.
    """
    with (folder / "printed").open("w+") as printed:
        process = fork_server().start(module, str(folder), *arguments, output=printed.fileno())
        try:
            process.wait(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            printed.seek(0)
            assert code == 0, f"exit status {code}:\n{printed.read()}"


@cache
def fork_server() -> ForkServer:
    """The process that forks ranks, and profilers, for all tests of this one. It is started by the first of them."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    given = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    environment = process_environment(given, ("cpu", "cpu"))
    preloaded = PROFILER if HAS_GPUS else (*PROFILER, *GROUP)
    with os.fdopen(os.dup(2), "wb") as log:  # the standard error of this process
        server = ForkServer(environment | {"PYTHONWARNINGS": "error::FutureWarning"}, log, preloaded)
    atexit.register(server.end)
    return server


def fork_ranks(run: Callable[[int], None], num_ranks: int, *, shared: Sequence[str] = ()) -> int:
    """Call `run` with each rank, each in a process of its own; return 0, or 1 as soon as one has failed.

    The modules `shared`, which `run` would import, are imported once, before, if the host has no GPUs.
    """
    for name in () if HAS_GPUS else shared:
        import_module(name)
    gc.freeze()  # each garbage collection of a rank would go through all that was imported
    for rank in range(num_ranks):
        if os.fork() == 0:
            run(rank)  # an exception ends this process with a traceback and status 1
            os._exit(0)
    return int(any(os.wait()[1] for _ in range(num_ranks)))
