"""Compilations beside timings: whether they disturb each other, and what a filled cache saves.

    python -m benchmarks.compile_beside benchmarks/published/llama-3.2-1b.json --device cuda:0 --out FILE

One layer of transformers' class is timed, eagerly, in rounds of two: alone, and beside processes that compile the same
layer over and over, each into an empty cache of its own. They stand still (SIGSTOP) while the layer is timed alone.
They compile for the device that is timed, or for the CPU, which loads the host alone. Then the layer is compiled in
new processes, with an empty cache and with the cache that the one before has filled.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe_environment, write_results
from bexp.child_process import end_with_parent
from bexp.transformers.settings import Settings
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.targets.transformers.model import BuildSettings
from bexp.workers.targets.transformers.passes import LayerPasses
from bexp.workers.targets.transformers.resolved import resolve

FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4], help="micro-batch sizes")
    parser.add_argument("--helpers", type=int, nargs="+", default=[1, 4, 8], help="numbers of processes that compile")
    parser.add_argument("--places", nargs="+", help="what processes compile for; default: the device, and the CPU")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", choices=("compile", "helper"), help="what a process of this command does")
    parser.add_argument("--parent", type=int, help="the process with which such a one ends")
    options = parser.parse_args(arguments)
    if options.role is not None:
        if end_with_parent(options.parent):
            work(options)
        return 0
    results: dict[str, Any] = {"environment": describe_environment(), "rows": []}
    for row in measure(options):
        print(json.dumps(row), flush=True)
        results["rows"].append(row)
        if options.out is not None:
            write_results(options.out, results)
    return 0


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the compilations of each size, then its timings beside each number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        for size in options.sizes:
            yield compile_apart(options, size, Path(folder))
    for place in dict.fromkeys(options.places or (options.device, "cpu")):
        for number in options.helpers:
            yield from time_beside(options, place, number)


@contextmanager
def passes_of(options: argparse.Namespace, size: int, *, compiled: bool) -> Iterator[LayerPasses]:
    """Build the passes of the model's first layer."""
    build = BuildSettings()
    resolved = resolve(json.loads(options.config.read_text()), options.seq_length, settings=build)
    part = resolved.builder(torch.device(options.device)).layer(resolved.kinds[0], size)
    passes = LayerPasses(part, build, Settings(compile=compiled), recompute=None)
    try:
        yield passes
    finally:
        passes.release()
        passes.restore()


def run_once(passes: LayerPasses, device: torch.device) -> None:
    """Run forward and backward to their end."""
    passes.prepare_forward()
    passes.forward()
    passes.prepare_backward()
    passes.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def work(options: argparse.Namespace) -> None:
    """Compile the layer and print the seconds: once, or until this process is killed, with an empty cache each time."""
    import torch._inductor.compile_fx  # noqa: PLC0415 - its seconds are of the import, not of the compiler

    device, (size, *_) = torch.device(options.device), options.sizes
    with passes_of(options, size, compiled=True) as passes:
        while True:
            with tempfile.TemporaryDirectory() as folder:
                if options.role == "helper":
                    os.environ.update(dict.fromkeys(FOLDERS, folder))
                torch.compiler.reset()
                seconds = []
                for _ in range(2):
                    started = time.perf_counter()
                    run_once(passes, device)
                    seconds.append(time.perf_counter() - started)
            print(json.dumps({"first": seconds[0], "second": seconds[1]}), flush=True)
            if options.role == "compile":
                return


def start(options: argparse.Namespace, role: str, size: int, device: str, folder: Path) -> subprocess.Popen[str]:
    """Start a process of this command, which keeps what it compiles in `folder`."""
    command = [sys.executable, "-m", "benchmarks.compile_beside", str(options.config), "--role", role]
    command += ["--parent", str(os.getpid())]
    command += ["--device", device, "--seq-length", str(options.seq_length), "--sizes", str(size)]
    environment = {**os.environ, **dict.fromkeys(FOLDERS, str(folder))}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def compile_apart(options: argparse.Namespace, size: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of compiling a size in two new processes, of which the second has the cache of the first."""
    found = []
    for _ in range(2):
        process = start(options, "compile", size, options.device, folder / str(size))
        printed, _ = process.communicate()
        found.append(json.loads(printed.splitlines()[-1]))
    return {"micro_batch_size": size, "empty_cache": found[0], "filled_cache": found[1]}


def time_beside(options: argparse.Namespace, place: str, number: int) -> list[dict[str, Any]]:
    """Return the timings of each size, alone and beside `number` processes that compile for `place`."""
    with tempfile.TemporaryDirectory() as folder:
        helpers = [start(options, "helper", options.sizes[0], place, Path(folder)) for _ in range(number)]
        try:
            for helper in helpers:
                assert helper.stdout is not None
                helper.stdout.readline()  # its first compilation has ended
            return [time_size(options, size, helpers, place) for size in options.sizes]
        finally:
            for helper in helpers:
                os.killpg(helper.pid, signal.SIGKILL)
                helper.wait()


def time_size(
    options: argparse.Namespace, size: int, helpers: Sequence[subprocess.Popen[str]], place: str
) -> dict[str, Any]:
    """Return the timings of one size."""
    instruments = Instruments(torch.device(options.device))
    rows: dict[str, list[tuple[float, float]]] = {"alone": [], "beside": []}
    with passes_of(options, size, compiled=False) as passes:
        instruments.timer.warm_up(passes)
        for _ in range(options.rounds):
            for name, number in (("alone", signal.SIGSTOP), ("beside", signal.SIGCONT)):
                for helper in helpers:
                    os.killpg(helper.pid, number)
                instruments.timer.warm_up(passes)
                timing = instruments.timer.time(passes)
                rows[name].append((timing.device_seconds, timing.host_seconds))
    summary = {
        f"{kind}_beside_over_alone": statistics.median(one[at] for one in rows["beside"])
        / statistics.median(one[at] for one in rows["alone"])
        for at, kind in enumerate(("device", "host"))
    }
    alone = sorted(one[0] for one in rows["alone"])
    spread = (alone[-1] - alone[0]) / statistics.median(alone)
    compiling = {"compiling_for": place, "processes": len(helpers), "micro_batch_size": size}
    return {**compiling, **summary, "spread_alone": spread, **rows}


if __name__ == "__main__":
    sys.exit(main())
