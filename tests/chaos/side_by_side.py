"""Many campaigns at once, each in a process of its own with its folder, database and port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.chaos.processes import ROOT, free_port
from tests.chaos.result import Result, result_from

FIRST_PORT = 18_000
"""Below the ports that Linux gives to outgoing connections, one of which could take that of an API that was killed."""

REST_SECONDS = 420.0
"""How long a campaign may take after its faults: starting, letting jobs end, cancels, checks."""


def run_campaigns(num: int, seed: int, minutes: float, options: Sequence[str]) -> tuple[list[Result], list[str]]:
    """Run `num` campaigns with the seeds from `seed` on; return their results, and a line for each that has none."""
    with tempfile.TemporaryDirectory(prefix="bexp-campaigns-") as name:
        folder = Path(name)
        children = []
        port = FIRST_PORT
        for index in range(num):
            port = free_port(port)
            children.append(_start(folder, index, port, seed + index, minutes, options))
            port += 1
        deadline = time.monotonic() + 60 * minutes + REST_SECONDS
        results, lost = [], []
        for index, child in enumerate(children):
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))
            if child.poll() is None:
                child.terminate()
                child.wait()
            try:
                results.append(result_from(json.loads((folder / f"{index}.json").read_text())))
            except (OSError, ValueError):
                log = (folder / f"{index}.log").read_text(errors="replace").strip()
                lost.append(f"seed {seed + index}: no result (status {child.returncode}): {log[-800:]}")
    return results, lost


def _start(
    folder: Path, index: int, port: int, seed: int, minutes: float, options: Sequence[str]
) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "tests.chaos", "--raw", "--minutes", str(minutes), "--seed", str(seed)),
        *("--port", str(port), "--output", str(folder / f"{index}.json"), *options),
    ]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with (folder / f"{index}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
