"""What a profiler does before the first trial, step by step, in a process of its own.

    python -m benchmarks.start benchmarks/published/llama-3.2-1b.json --device cuda:0 --out FILE

Steps are those of `bexp.workers.profiler`: imports, the device, its peak rates, and the report on a model's settings.
Of each step, the functions and the modules' own code that take longest are listed, with all that they call: the process
is looked at every few milliseconds. Empty the caches of Triton and inductor for a first start.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.environment import describe_commit, describe_environment, write_results

LISTED = 30
EVERY_SECONDS = 0.005


class Steps:
    """Seconds of steps, by the clock and of this process's threads, with what took longest in this thread."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._own = threading.get_ident()
        self._seconds: Counter[str] = Counter()
        self._begun = time.perf_counter()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count a step."""
        clock, busy = time.perf_counter(), time.process_time()
        self._begun, self._seconds = clock, Counter()
        yield
        longest = dict(self._seconds.most_common(LISTED))
        row: dict[str, Any] = {"step": name, "seconds": time.perf_counter() - clock}
        row |= {"cpu_seconds": time.process_time() - busy, "longest": longest}
        self.rows.append(row)
        print(f"{name:24} {row['seconds']:6.2f} s by the clock, {row['cpu_seconds']:6.2f} s of processors", flush=True)
        for function, seconds in row["longest"].items():
            print(f"    {seconds:6.2f} s of {function}", flush=True)

    def end(self) -> None:
        """Look no more."""
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        """Add the time since the last look, within a step, to each function that this process's first thread is in."""
        before = time.perf_counter()
        while not self._is_over.wait(EVERY_SECONDS):
            now = time.perf_counter()
            functions = set(_functions(sys._current_frames().get(self._own)))
            self._seconds.update(dict.fromkeys(functions, now - max(before, self._begun)))
            before = now


def _functions(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith(("importlib", "contextlib", "runpy")):
            yield f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the steps, and write their seconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    steps = Steps()
    # Imports are steps.
    with steps.step("import torch"):
        import torch  # noqa: PLC0415 - a step
    with steps.step("import the profiler"):
        from bexp.explorer.formats.document import load_document  # noqa: PLC0415 - a step
        from bexp.explorer.formats.request import parse_request  # noqa: PLC0415 - a step
        from bexp.workers.instruments.device_instruments import Instruments  # noqa: PLC0415 - a step
        from bexp.workers.instruments.kernel_builder import KernelBuilder  # noqa: PLC0415 - a step
        from bexp.workers.profiler.hardware import measure_hardware  # noqa: PLC0415 - a step
        from bexp.workers.targets.choice import import_target, open_target  # noqa: PLC0415 - a step
    overrides = {"hf_seq_length": options.seq_length, "batch_size": 32, "target": "transformers"}
    request = parse_request(load_document(options.config.read_text()), overrides=overrides)
    device = torch.device(options.device)
    with steps.step("open the device"):
        instruments = Instruments(device)
        instruments.kernels = KernelBuilder(device)
    with steps.step("measure its rates"):
        hardware = measure_hardware(device, None)
    if "expert" in str(request.hf_config):
        instruments.kernels.start()
    with steps.step("import the target"):
        import_target(request.target_name)
    with steps.step("open the target"):
        target = open_target(request, instruments)
    with steps.step("report"):
        report = target.report(hardware)
    steps.end()
    instruments.kernels.close()
    found = {
        "environment": describe_environment(),
        "commit": describe_commit(),
        "config": options.config.name,
        "device": options.device,
        "refusal": report.refusal,
        "steps": steps.rows,
    }
    if options.out is not None:
        write_results(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
