"""What a profiler does before the first trial, step by step, in a process of its own.

    python -m benchmarks.start benchmarks/published/llama-3.2-1b.json --device cuda:0 --out FILE

Steps are those of `bexp.workers.profiler`: imports, the device, its peak rates, and the report on a model's settings.
Of the report, the functions of this project that take longest are listed, with all that they call; a profile of
Python's calls makes it longer by a little. Empty the caches of Triton and inductor for a first start.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_commit, describe_environment, write_results

LISTED = 40
PROJECT = "bexp."


class Steps:
    """Seconds of steps, by the clock and of this process's threads."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count a step."""
        clock, busy = time.perf_counter(), time.process_time()
        yield
        row = {"step": name, "seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - busy}
        self.rows.append(row)
        print(f"{name:24} {row['seconds']:6.2f} s by the clock, {row['cpu_seconds']:6.2f} s of processors", flush=True)


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
    profile = cProfile.Profile()
    with steps.step("report"):
        report = profile.runcall(target.report, hardware)
    instruments.kernels.close()
    found = {
        "environment": describe_environment(),
        "commit": describe_commit(),
        "config": options.config.name,
        "device": options.device,
        "refusal": report.refusal,
        "steps": steps.rows,
        "functions": functions(profile),
    }
    for row in found["functions"]:
        print(f"{row['seconds']:7.2f} s in {row['calls']:5} of {row['function']}", flush=True)
    if options.out is not None:
        write_results(options.out, found)
    return 0


def functions(profile: cProfile.Profile) -> list[dict[str, Any]]:
    """Return the functions of this project that take longest, with what they call."""
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # not in its stubs
    modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    rows = [
        {"function": f"{modules[file]}.{name}", "calls": calls, "seconds": together}
        for (file, _, name), (calls, _, _, together, _) in stats.items()
        if (modules.get(file) or "").startswith(PROJECT)
    ]
    return sorted(rows, key=lambda row: -float(row["seconds"]))[:LISTED]


if __name__ == "__main__":
    sys.exit(main())
