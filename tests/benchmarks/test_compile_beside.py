"""Timings beside processes that stand still and go on."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.compile_beside import time_size
from tests.waits import PATIENCE_SECONDS, wait_until
from tests.workers.targets.transformers.targets import LLAMA


def test_a_layer_is_timed_alone_and_beside_processes_that_go_on(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    options = Namespace(config=config, seq_length=16, device="cpu", rounds=2)
    helper = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True, text=True)
    try:
        row = time_size(options, 1, [helper], "cpu")
        assert psutil.Process(helper.pid).status() != psutil.STATUS_STOPPED
    finally:
        helper.kill()
        helper.wait()
    assert [len(row[name]) for name in ("alone", "beside")] == [2, 2]
    assert row["device_beside_over_alone"] > 0
    assert row["processes"] == 1


def test_processes_that_compile_end_with_the_command(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    command = [sys.executable, "-m", "benchmarks.compile_beside", str(config), "--device", "cpu", "--seq-length", "16"]
    benchmark = subprocess.Popen([*command, "--sizes", "1", "--helpers", "1"], stdout=subprocess.DEVNULL)
    started = list[psutil.Process]()

    def starts() -> bool:
        started[:] = psutil.Process(benchmark.pid).children()
        with suppress(psutil.Error):  # one of them, such as a question to git, has just ended
            return any("--role" in each.cmdline() for each in started)
        return False

    try:
        wait_until(starts)
    finally:
        benchmark.kill()
        benchmark.wait()
    psutil.wait_procs(started, timeout=PATIENCE_SECONDS)
    assert not any(each.is_running() for each in started)
