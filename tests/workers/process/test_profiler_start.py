"""How real profiler processes on the CPU start, and how they end with whoever started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bexp.workers.devices.lock import DeviceLocks
from bexp.workers.process.interface import ProfilerError, ProfilerStartError
from bexp.workers.process.profiler import Profiler
from bexp.workers.process.start import StartedProcess, process_environment
from tests.waits import PATIENCE_SECONDS, wait_until
from tests.workers.process.profilers import ENVIRONMENT, kill_while_starting

pytestmark = pytest.mark.slow


def test_a_command_and_its_worker_start_without_what_they_seldom_need() -> None:
    """Torch takes seconds to import. Alembic changes tables, rich prints for people."""
    script = """
import sys
import bexp.api.cli.explore, bexp.api.stored, bexp.workers.__main__
sys.exit(bool(sys.modules.keys() & {"torch", "alembic", "rich", "transformers", "fastapi", "httpx"}))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_SECONDS, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize(
    ("module", "slow"), [("bexp.api.cli.explore", "sqlalchemy"), ("bexp.workers.__main__", "pydantic")]
)
def test_the_next_process_starts_before_what_takes_long_is_imported(module: str, slow: str) -> None:
    """The command starts the worker, and the worker the profiler, whose imports take longest."""
    script = f"import sys, {module}; sys.exit({slow!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_SECONDS, cwd=Path(__file__).parents[3])


def test_a_process_that_was_started_in_advance_is_the_first(tmp_path: Path) -> None:
    started = StartedProcess(("cpu",), process_environment(ENVIRONMENT, ("cpu",)))
    profiler = Profiler("cpu", environment=ENVIRONMENT, lock_directory=tmp_path, started=started)
    profiler.prepare()
    with profiler:
        assert profiler.pid == started.popen.pid


def test_a_device_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="cuda:0"):
        Profiler("cuda:0", environment={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    profiler = Profiler("cpu", lock_directory=tmp_path, environment=environment)
    with pytest.raises(ProfilerError, match="libcudart is missing"):
        profiler.start()
    profiler.close()


def test_a_process_that_is_killed_at_each_start_is_an_error_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = Profiler("cpu", environment=ENVIRONMENT, lock_directory=tmp_path, start_pauses_seconds=(0.05,))
    kill_while_starting(profiler, 2, monkeypatch)
    with pytest.raises(ProfilerStartError, match="SIGKILL"):
        profiler.start()
    profiler.close()


def test_the_process_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import pathlib
from tests.workers.profiler.samples import REQUEST
from tests.workers.process.profilers import ENVIRONMENT, slow_trial
from bexp.workers.process.profiler import Profiler
from bexp.workers.process.start import StartedProcess, process_environment
profiler = Profiler("cpu", environment=ENVIRONMENT, lock_directory=pathlib.Path({str(tmp_path)!r}))
profiler.start()
profiler.begin(REQUEST)
print(profiler.pid, flush=True)
while True:
    slow_trial(profiler)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.5)
    assert child.is_running()
    parent.kill()
    parent.communicate(timeout=PATIENCE_SECONDS)
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert DeviceLocks(["cpu"], directory=tmp_path).acquire(timeout_seconds=PATIENCE_SECONDS)
