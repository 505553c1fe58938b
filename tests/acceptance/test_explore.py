"""`bexp explore`, as typed by a person who has nothing else installed or running."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.database import Database
from bexp.storage.jobs import JobState, list_jobs
from bexp.storage.queue import Queue
from bexp.storage.schema import upgrade
from tests.acceptance.conftest import TINY, Machine, await_gone, profilers_of
from tests.bexp.test_child_process import write_hostile_packages
from tests.waits import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow

TABLES = Path(__file__).parents[2] / "benchmarks"
ENDLESS = {"max_seconds": 2 * PATIENCE_SECONDS, "max_trials": 500, "confidence_target": 99}
LINE = re.compile(r"BEXP\d{3} \d\d:\d\d:\d\d GMT  \S.*")
RECOMMENDATION = re.compile(
    r"BEXP202 \d\d:\d\d:\d\d GMT  Current recommended micro_batch_size: (\d+), "
    r"estimated performance: \d+\.\d\dx base, confidence score: \d\d? \(out of 100\)"
)


def test_explore_prints_lines_and_the_answer_and_keeps_both(
    machine: Machine, open_url: Callable[[str], Database]
) -> None:
    """It runs no job that was forgotten, and neither it nor its processes import from the folder it is run in."""
    database = open_url(machine.database_url)
    upgrade(database)
    forgotten, _ = Queue(database).enqueue(ExplorationRequest.model_validate(TINY))
    imported = write_hostile_packages(machine.folder)
    printed = machine.run("explore", machine.configure(), "--device", "cpu", "--log-dir", ".")
    lines, _, answer = printed.partition("\n\n")
    assert all(LINE.fullmatch(line) for line in lines.splitlines())
    recommended = [match[1] for match in map(RECOMMENDATION.fullmatch, lines.splitlines()) if match]
    assert lines.startswith("BEXP101")
    assert lines.splitlines()[-1].startswith("BEXP401")
    assert answer.startswith(f"Recommended micro_batch_size: {recommended[-1]} for tiny")

    (log,) = (machine.folder / "local_compile_train" / "tiny").iterdir()
    assert log.read_text() == lines + "\n"

    job_id = log.stem.removeprefix("run_")
    assert machine.run("best", job_id) == recommended[-1] + "\n"
    listed = {job["id"]: job for job in json.loads(machine.ask("list", "--json"))}
    assert listed[job_id]["state"] == "succeeded"
    assert str(listed[job_id]["micro_batch_size"]) == recommended[-1]
    assert listed[forgotten.id]["state"] == "queued"
    assert not imported.exists(), imported.read_text()


def test_a_held_device_is_named_and_free_after_ctrl_c_and_a_killed_command_leaves_no_process(
    machine: Machine, open_url: Callable[[str], Database]
) -> None:
    endless = machine.configure(micro_batch_size="explore", batch_size=256, bta={}, budget=ENDLESS)
    holder = machine.start("explore", endless, "--device", "cpu")
    wait_until(lambda: "BEXP102" in machine.out(holder), "the job does not start")
    children = psutil.Process(holder.pid).children(recursive=True)
    (profiler,) = profilers_of(psutil.Process(holder.pid))
    profiler.suspend()  # it holds the device, and leaves the processor to the second
    second = machine.start("explore", endless, "--device", "cpu")
    wait_until(lambda: "BEXP105" in machine.out(second), "the second does not say why it waits")
    (line,) = (line for line in machine.out(second).splitlines() if line.startswith("BEXP105"))
    assert re.search(r"cpu is in use by process \d+ of user \S+, started .*bexp\.workers", line)
    assert "name another device with --device" in line
    profiler.resume()
    holder.send_signal(signal.SIGINT)
    assert holder.wait(PATIENCE_SECONDS) == 130
    await_gone(children, 0)
    assert "Traceback" not in machine.err(holder)
    assert "` continues it" in machine.err(holder)
    wait_until(lambda: "BEXP102" in machine.out(second), "the device is not free")
    children = psutil.Process(second.pid).children(recursive=True)
    second.kill()
    await_gone(children, 300)
    states = [job.state for job in list_jobs(open_url(machine.database_url))[0]]
    assert states == [JobState.CANCELLED] * 2


def test_of_four_gpus_as_many_are_taken_as_can_be_used(machine: Machine) -> None:
    machine.environment["CUDA_VISIBLE_DEVICES"] = "MIG-0,MIG-1,MIG-2,MIG-3"  # which no process can open
    (machine.folder / "broken").mkdir()
    (machine.folder / "broken" / "torch.py").write_text("raise ImportError('broken')")  # sooner than a real one fails
    machine.environment["PYTHONPATH"] = f"{machine.folder / 'broken'}:{machine.environment['PYTHONPATH']}"
    command = machine.start("explore", machine.configure(), "--num-devices", "2")
    assert command.wait(PATIENCE_SECONDS) == 3
    assert re.search("of {cuda:0, cuda:1} .*broken", machine.err(command)), machine.err(command)
