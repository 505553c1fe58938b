"""`bexp tune`: the best micro-batch of a training command that works, from a few steps of that command."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from bexp.api.cli import options
from bexp.api.cli.arguments import AsJson, Command, Verbose
from bexp.api.cli.connection import open_stored
from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.explore import WorkerDevice
from bexp.api.cli.job_ids import find_job
from bexp.api.cli.local_run import LocalRun, check_devices, named_devices
from bexp.api.cli.results import terminal_width
from bexp.api.cli.tune_answer import TuneAnswer, check_writable, describe_training
from bexp.api.cli.tuned_command import YAML_OF, TunedCommand
from bexp.client.explorations import Exploration, Explorations
from bexp.explorer.answers.text import wrap
from bexp.explorer.model.target import name_local_target
from bexp.explorer.request.request import ExplorationRequest
from bexp.storage.ids import new_job_id
from bexp.tune.environment import temporary_folder
from bexp.tune.placeholders import APPLY, APPLY_VALUES, scalar_of, stands_in

Try = Annotated[
    list[str] | None,
    typer.Option(
        "--try",
        metavar="NAME=A,B",
        help="Values to try for a field of TrainingArguments, or for {NAME} in the command; the first is the command's "
        "own. May be given again.",
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Continue an exploration of the same command; its trials count."),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="How many sequences each device processes in an optimizer step.",
        show_default="what the command's Trainer says",
    ),
]
Write = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=f"Write the YAML of a command of {YAML_OF} with the answer to FILE, which must not exist yet.",
    ),
]
Apply = Annotated[
    bool,
    typer.Option(
        "--apply",
        metavar="",
        help="Try also what bexp.apply does to the Trainer's model: expert kernels, chunked loss, compiled layers.",
    ),
]
Run = Annotated[
    bool,
    typer.Option(
        "--run",
        metavar="",
        help="Then start the command with the answer, and compare its first steps with the promised speed.",
    ),
]
HIDDEN = "..."
_KEY = r"(?:api|access|secret|private|auth|wandb|comet|neptune|hf|hub|openai)[-_]?key"
_NAME = rf"(?:[A-Za-z0-9_.-]*[-_.])?(?:token|secret|password|passwd|{_KEY}|credentials?)"
_SECRET = re.compile(rf"-*{_NAME}", re.IGNORECASE)
_SECRET_TEXT = re.compile(rf"(?<![\w.-])(-*{_NAME}['\"]?\s*[=:]\s*)(?:'[^']*'|\"[^\"]*\"|[^\s'\"]+)", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(?<![A-Za-z0-9])(?:hf_|sk-|ghp_)[A-Za-z0-9_-]{3,}|(?<=://)[^/@\s]+:[^/@\s]+(?=@)")
_SCRIPT = re.compile(r"[^-\s]\S*\.py")
_RUNS_SCRIPT = re.compile(r"python[\d.]*|torchrun|accelerate")
_PROGRAM = re.compile(r"([^/\s]+?)\.(py|ya?ml|json)$")


def tune(
    command: Command,
    tries: Try = None,
    batch_size: BatchSize = None,
    micro_batch_size: options.MicroBatchSize = None,
    write: Write = None,
    apply: Apply = False,
    run: Run = False,
    resume: Resume = None,
    device: WorkerDevice = None,
    max_seconds: options.MaxSeconds = None,
    max_trials: options.MaxTrials = None,
    confidence_target: options.ConfidenceTarget = None,
    labels: options.Label = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Find the best micro-batch size of a training command, by running a few steps of it at several sizes.

    The batch stays what the command says. bexp sets the size within transformers' Trainer and its children, Lightning's
    Trainer and accelerate's loops, which then save, log and push nothing. For any other loop, write {micro_batch_size},
    and {grad_accum_steps} if it accumulates, where the command takes them; such a loop saves and logs as always.

    Example: bexp tune -- accelerate launch train.py

    Example: bexp tune --run --write tuned.yaml -- axolotl train config.yaml

    Example: bexp tune --batch-size 64 -- python train.py size={micro_batch_size} steps={grad_accum_steps}
    """
    check_startable(command)
    tried, tuned = dict(_read_try(text, command) for text in tries or ()), TunedCommand(command)
    if apply:
        tried[APPLY] = APPLY_VALUES
    if write is not None:
        check_writable(tuned, write)
    check_devices(device)
    devices = tuple(sorted(set(named_devices(device)), key=lambda name: (len(name), name)))
    if device is not None and not devices:
        raise CommandError(ExitCode.USAGE, "--device is cpu, cuda:0 or cuda:0-1: a recording runs no command")
    with _described(command, tried, batch_size, devices) as reference:
        fields = options.collect_fields(
            micro_batch_size=micro_batch_size,
            max_seconds=max_seconds,
            max_trials=max_trials,
            confidence_target=confidence_target,
            labels=labels,
        )
        kind = options.device_kind(device)
        request = _build(command, tried, batch_size, fields, reference, kind, max(1, len(devices)))
        with open_stored() as stored:
            old = None if resume is None else _resumable(stored, resume, request)
            job_id = new_job_id() if old is None else old.id
            worker = LocalRun(request, job_id, devices[0] if devices else None, local_target=reference)
            if old is None:
                job = stored.submit(request, job_id=worker.job_id, own_worker=worker.worker_name)
            else:
                job = stored.resume(old.id, own_worker=worker.worker_name)
            with worker:
                code = worker.follow(stored, job, as_json=as_json, verbose=verbose)
            answer = TuneAnswer.find(stored, job.id, tried, batch_size)
            if answer is not None and not as_json:
                described = describe_training(stored, job.id, answer.best.candidate, answer.most_bytes)
                typer.echo("\n".join(wrap([*answer.rows(tuned), *described], terminal_width())))
    if answer is not None and code is ExitCode.ANSWER:  # all that the exploration needed is gone by now
        if write is not None:
            answer.write(tuned, write)
        if run:
            answer.run(tuned, device, write)
    raise typer.Exit(code)


def check_startable(command: Sequence[str]) -> None:
    """Raise CommandError if the program of a command is not there, or the script that Python or a launcher is to run.

    Arguments of other programs are for them to judge.
    """
    program = command[0]  # a Path of './train.sh' would be looked for on PATH
    named = (each for before, each in pairwise(command) if _SCRIPT.fullmatch(each) and not before.startswith("-"))
    script = next(named, None)
    if shutil.which(program) is None:
        raise CommandError(ExitCode.USAGE, f"there is no program '{program}'")
    has_module = any(each.startswith(("-m", "-c", "--module")) for each in command[1:])
    runs_script = _RUNS_SCRIPT.fullmatch(Path(program).name) and not has_module
    if script is not None and runs_script and not Path(script).exists():
        raise CommandError(ExitCode.USAGE, f"there is no script '{script}' in {Path.cwd()}")


def hide_secrets(command: Sequence[str]) -> list[str]:
    """Return the arguments of a command without those that look like secrets: they are not stored."""
    shown, is_next = [], False
    for argument in command:
        hidden = _SECRET_VALUE.sub(HIDDEN, _SECRET_TEXT.sub(rf"\1{HIDDEN}", argument))
        shown.append(HIDDEN if is_next else hidden)
        is_next = argument.startswith("-") and _SECRET.fullmatch(argument) is not None
    return shown


def name_command(command: Sequence[str]) -> str:
    """Return the name of a command: its script, file of settings or module, else its program."""
    names = [match[1] for argument in command if (match := _PROGRAM.search(argument))]
    names += [name.rpartition(".")[2] for flag, name in pairwise(command) if flag == "-m"]
    return names[0] if names else Path(command[0]).name


@contextmanager
def _described(
    command: Sequence[str], tries: dict[str, list[Any]], batch_size: int | None, devices: Sequence[str]
) -> Iterator[str]:
    """Yield the reference of a file with the command for the worker, which only this user can read."""
    with tempfile.TemporaryDirectory(prefix="bexp-command-", dir=temporary_folder()) as folder:
        file = Path(folder) / f"{re.sub('[^A-Za-z0-9_.-]', '-', name_command(command))}.json"
        own = {"folder": str(Path.cwd()), "devices": list(devices)}
        document = {"command": list(command), "tries": tries, "batch_size": batch_size, **own}
        file.write_text(json.dumps(document))
        yield f"{file}:command"


def _build(
    command: Sequence[str],
    tries: dict[str, list[Any]],
    batch_size: int | None,
    fields: dict[str, Any],
    reference: str,
    device_kind: str | None,
    num_devices: int,
) -> ExplorationRequest:
    whole = json.dumps([list(command), str(Path.cwd()), batch_size, num_devices]).encode()
    shown: dict[str, Any] = {
        "command": shlex.join(hide_secrets(command)),
        "digest": hashlib.sha256(whole).hexdigest()[:32],  # tells another command from the same one
        **({"tries": tries} if tries else {}),
    }
    document = {"target": name_local_target(reference), "target_config": shown, "device_kind": device_kind}
    return options.build_request(Path("-"), document, fields)


def _resumable(stored: Explorations, job_id: str, request: ExplorationRequest) -> Exploration:
    """Return an exploration to go on with: of the same command, which has not succeeded."""
    job = find_job(stored, job_id)
    if job.request is None or job.request.target_config != request.target_config:
        said = None if job.request is None else (job.request.target_config or {}).get("command")
        raise CommandError(ExitCode.USAGE, f"exploration {job.id} is of another command: {said or 'none'}")
    if job.state == "succeeded":
        raise CommandError(
            ExitCode.USAGE, f"exploration {job.id} has succeeded: `bexp best {job.id}` prints its answer"
        )
    return job


def _read_try(text: str, command: Sequence[str]) -> tuple[str, list[Any]]:
    """Return the name and the values of a setting: as typed if its name stands in the command, else as plain data."""
    name, separator, values = text.partition("=")
    if not separator or not name.isidentifier() or not values:
        raise CommandError(ExitCode.USAGE, f"--try {text!r} is not of the form NAME=A,B")
    typed = values.split(",")
    return name, typed if stands_in(name, command) else list(map(scalar_of, typed))
