"""`bexp tune` from its command line to its answer; the worker, which would run the command, is left out."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bexp.api.cli import tune
from bexp.api.cli.errors import ExitCode
from bexp.explorer.records.event import Progress
from bexp.explorer.records.recommendation import Answer, VariantAnswer
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.jobs import JobState, get_job, list_jobs
from bexp.storage.queue import Queue
from bexp.tune import link
from bexp.tune.placeholders import APPLY, APPLY_VALUES
from bexp.workers.targets.custom.command import CommandProcess
from bexp.workers.targets.custom.training_command import TrainingCommand
from tests.api.cli.conftest import Run, Started
from tests.contracts.samples import make_recommendation, make_worker

pytestmark = pytest.mark.parametrize("bexp", ["database"], indirect=True)
COMMAND: list[str] = ["true", "train.py"]


class Trials:
    """Stands for the worker: it keeps what it was told, and ends the exploration as told."""

    state = JobState.SUCCEEDED
    told: dict[str, Any]
    queue: Queue

    def __init__(self, request: ExplorationRequest, job_id: str, device: str | None, *, local_target: str) -> None:
        self.job_id, self.worker_name = job_id, "tuner"
        file = Path(local_target.rpartition(":")[0])
        Trials.told = {"request": request, "device": device, "file": file, "mode": file.parent.stat().st_mode & 0o777}
        Trials.told["command"] = json.loads(file.read_text())

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def follow(self, _: object, job: Any, *, as_json: bool, verbose: bool) -> ExitCode:
        assert job.id == self.job_id
        request = Trials.told["request"]
        kind, targets = request.device_kind or "cpu", {request.target: ""}
        claim = self.queue.claim(make_worker("t", kind, request.num_devices, targets=targets, name=self.worker_name))
        assert claim is not None
        found = make_recommendation(2).model_copy(update={"grad_accum_steps": 4})
        if self.state is JobState.SUCCEEDED:
            variant = VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=found)
            progress = Progress(recommendation=found, answer=Answer(variants=(variant,)))
            self.queue.finish(claim.lease, self.state, last=progress)
            return ExitCode.ANSWER
        self.queue.finish(claim.lease, self.state, last=Progress(recommendation=found))
        return ExitCode.NO_ANSWER


@pytest.fixture(autouse=True)
def trials(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> type[Trials]:
    monkeypatch.setattr(tune, "LocalRun", Trials)
    monkeypatch.setattr(Trials, "queue", queue, raising=False)
    return Trials


def test_the_worker_alone_learns_the_command(bexp: Run, trials: type[Trials], tmp_path: Path) -> None:
    options = "--device cpu --batch-size 8 --micro-batch-size 2,4 --max-trials 3 --max-seconds 9 --label a=b"
    flags = ["--hub_token", "secret", "--optim", "sgd"]
    done = bexp("tune", *options.split(), "--try", "optim=sgd,adafactor", "--", *COMMAND, *flags)
    assert done.code == 0
    assert done.stdout.startswith("  for the command ")
    assert "add --per_device_train_batch_size 2" in " ".join(done.stdout.split())
    told = trials.told
    assert told["command"] == {
        "command": [*COMMAND, *flags],
        "tries": {"optim": ["sgd", "adafactor"]},
        "batch_size": 8,
        "folder": str(tmp_path),
        "devices": ["cpu"],
    }
    assert (told["device"], told["mode"], told["file"].exists()) == ("cpu", 0o700, False)
    request = told["request"]
    assert (request.target, request.device_kind, request.labels) == ("local.train", "cpu", {"a": "b"})
    assert (request.budget.max_trials, request.budget.max_seconds) == (3, 9)
    assert request.target_config["command"] == "true train.py --hub_token ... --optim sgd"
    assert request.target_config["tries"] == {"optim": ["sgd", "adafactor"]}


def test_a_trial_that_is_killed_leaves_nothing_even_if_the_temporary_folder_has_a_long_path(
    bexp: Run, trials: type[Trials], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    made: list[CommandProcess] = []
    monkeypatch.setattr(
        trials, "__enter__", lambda _: made.append(CommandProcess(TrainingCommand.read(trials.told["file"])))
    )
    assert bexp("tune", "--device", "cpu", "--", *COMMAND).code == 0
    assert not made[0]._folder.exists()
    made[0].end()


def test_settings_of_apply_are_tried_if_asked_for(bexp: Run, trials: type[Trials]) -> None:
    bexp("tune", "--device", "cpu", "--", *COMMAND)
    assert trials.told["command"]["tries"] == {}
    assert "tries" not in trials.told["request"].target_config
    bexp("tune", "--device", "cpu", "--apply", "--", *COMMAND)
    assert trials.told["command"]["tries"] == {APPLY: APPLY_VALUES}


def test_several_devices_are_those_of_the_command(
    bexp: Run, trials: type[Trials], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "check_devices", lambda _: None)
    assert bexp("tune", "--device", "cuda:2-10,cuda:3", "--", *COMMAND).code == 0
    devices = [f"cuda:{number}" for number in range(2, 11)]
    assert (trials.told["command"]["devices"], trials.told["device"]) == (devices, "cuda:2")
    assert (trials.told["request"].num_devices, trials.told["request"].device_kind) == (1, "cuda")
    refused = bexp("tune", "--device", "replay:x", "--", *COMMAND)
    assert (refused.code, "a recording runs no command" in refused.stderr) == (2, True)


def test_the_command_is_run_and_written_only_with_an_answer(
    bexp: Run, trials: type[Trials], started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own.yaml").write_text("micro_batch_size: 1\n")
    Path("own.yaml").chmod(0o600)
    program = Path("axolotl").absolute()
    program.touch(0o755)
    command = ["--device", "cpu", "--run", "--write", "tuned.yaml", "--", str(program), "train", "own.yaml"]
    monkeypatch.setattr(trials, "state", JobState.CANCELLED)
    stopped = bexp("tune", *command)
    assert (stopped.code, started, Path("tuned.yaml").exists()) == (1, [], False)
    assert "micro_batch_size: 1 -> 2 in own.yaml" in stopped.stdout
    assert (bexp("tune", "--json", *command[:2], *command[5:]).stdout, started) == ("", [])
    monkeypatch.setattr(trials, "state", JobState.SUCCEEDED)
    assert bexp("tune", *command).code == 0
    assert Path("tuned.yaml").read_text() == "micro_batch_size: 2\ngradient_accumulation_steps: 4\n"
    assert Path("tuned.yaml").stat().st_mode & 0o777 == 0o600, "whoever cannot read the one cannot read its copy"
    ((arguments, environment),) = started
    assert arguments == [str(program), "train", "tuned.yaml"]
    assert (environment[link.SIZE], environment["CUDA_VISIBLE_DEVICES"]) == ("2", "")


def test_an_exploration_of_the_same_command_goes_on(
    bexp: Run, trials: type[Trials], queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "state", JobState.CANCELLED)
    bexp("tune", "--", *COMMAND)  # which is for one device, as with --device cpu
    (job, *_), _ = list_jobs(queue.database)
    monkeypatch.setattr(trials, "state", JobState.SUCCEEDED)
    for other in ([*COMMAND, "--x"], ["--batch-size", "4", "--", *COMMAND]):
        refused = bexp("tune", "--device", "cpu", "--resume", job.id, *(["--"] if "--" not in other else []), *other)
        assert refused.code == 2
        assert f"exploration {job.id} is of another command: true train.py\n" in refused.stderr
    assert bexp("tune", "--device", "cpu", "--resume", job.id, "--", *COMMAND).code == 0
    assert get_job(queue.database, job.id).state is JobState.SUCCEEDED
    again = bexp("tune", "--device", "cpu", "--resume", job.id, "--", *COMMAND)
    assert (again.code, f"has succeeded: `bexp best {job.id}` prints its answer" in again.stderr) == (2, True)
