"""An exploration with a worker of its own on this machine, which ends with the command."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from bexp.api.cli import options
from bexp.api.cli.connection import environment, shown_url
from bexp.api.cli.errors import CommandError, ExitCode, say
from bexp.api.local_worker import LocalWorker, WorkerEndedError
from bexp.client.errors import ProblemError, ServiceError
from bexp.explorer.model.spelling import did_you_mean
from bexp.explorer.model.target import TRANSFORMERS, describe_target
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.device_names import RECORDED, parse_devices
from bexp.storage.ids import new_worker_name
from bexp.targets.registry import installed_targets
from bexp.tune.waiting import Notes

if TYPE_CHECKING:
    from bexp.api.stored import StoredExplorations
    from bexp.client.explorations import Exploration

CANCEL_SECONDS = 5.0
CHECK_SECONDS = 1.0
REMIND_SECONDS = 30.0


class LocalRun:
    """A worker for the exploration `job_id`, which may be submitted while it starts. It lives in the context.

    Submit the exploration for `worker_name`, so that no other worker takes it.

    Args:
        request: of the exploration.
        job_id: its id.
        device: as on the command line; None if it was not given.
        target: likewise.
        local_target: the reference of a training command.
        is_shared: the exploration waited for any worker before. If this one fails, it does so again.

    Raises:
        CommandError: the worker would lack the target or enough devices, or its device is of another kind or missing.
    """

    def __init__(
        self,
        request: ExplorationRequest,
        job_id: str,
        device: str | None,
        target: str | None = None,
        *,
        local_target: str | None = None,
        is_shared: bool = False,
    ) -> None:
        _, file = (None, local_target) if local_target is not None else options.split_target(target)
        if file is None:
            _check_target(request, device)
        counts = usable_device_counts(request)
        group = counts[-1] > 1
        _check_kind_of_device(device, request.device_kind)
        _check_number_of_devices(device, counts[0])
        owned = request.device_kind if device is None and (request.device_kind == "cpu" or not group) else device
        check_devices(owned)
        chosen = ["--device", owned] if owned is not None else ["--num-devices", ",".join(map(str, counts))]
        self.job_id = job_id
        self.worker_name = new_worker_name()
        given = (("--device", device), ("--target", target if file is not None else None))
        parts = [part for name, value in given if value for part in (name, value)]
        self._again = shlex.join(["bexp", "resume", job_id, *parts])
        if local_target is not None:
            self._again = f"bexp tune --resume {job_id} -- COMMAND"
        self._options = [*chosen, *(["--group"] if group else [])]
        self._more_environment = {} if file is None else {"BEXP_LOCAL_TARGET": file}
        self._is_shared = is_shared
        self._has_started = False
        self._notes = None if local_target is None else Notes(Path(local_target.rpartition(":")[0]).parent)

    def __enter__(self) -> Self:
        self._begun = self._checked = time.monotonic()
        self._worker = LocalWorker(
            self.job_id,
            self.worker_name,
            self._options,
            database_url=environment().database_url,
            more_environment=self._more_environment,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.stop(keeps_log=isinstance(error, ServiceError))

    def follow(
        self,
        stored: StoredExplorations,
        job: Exploration,
        *,
        as_json: bool,
        verbose: bool = False,
        log_dir: Path | None = None,
    ) -> ExitCode:
        """Follow the exploration to its end and print the answer; its log is kept below `log_dir` if that is given.

        Ctrl-C or a failure cancels the exploration, because nobody waits for it, unless it is another worker's.
        """
        from bexp.api.cli.following import follow  # noqa: PLC0415 - the worker starts meanwhile
        from bexp.api.cli.results import conclude, say_best  # noqa: PLC0415 - the worker starts meanwhile

        say(f"exploration {job.id}, kept in {shown_url(environment().database_url)}")
        try:
            with self.cancelling(stored):
                last = follow(stored, job, to_stderr=as_json, log_dir=log_dir, check=lambda: self.check(stored))
        except KeyboardInterrupt:
            say_best(stored, job.id)
            say(f"`{self._again}` continues it")
            raise
        return conclude(stored, job.id, last, as_json=as_json, verbose=verbose)

    @contextmanager
    def cancelling(self, stored: StoredExplorations) -> Iterator[None]:
        """Cancel the exploration if the context fails or is stopped; a shared one waits again if its worker fails."""
        try:
            yield
        except BaseException as error:  # Ctrl-C too
            with suppress(ProblemError, ServiceError):
                if self._is_shared and isinstance(error, WorkerEndedError):
                    stored.share(self.job_id, own_worker=self.worker_name)
                    say(f"exploration {self.job_id} waits for any worker again")
                else:
                    self.cancel(stored)
            raise

    def check(self, stored: StoredExplorations) -> None:
        """Raise WorkerEndedError if the worker has failed, or if somebody has ended it before the exploration.

        Every REMIND_SECONDS, say why the exploration has not started. Say also what trials of a command wait for.
        """
        for text in () if self._notes is None else self._notes.new():
            say(text)
        is_alive = self._worker.check()
        now = time.monotonic()
        if (self._has_started and is_alive) or now - self._checked < CHECK_SECONDS:
            return
        waited = now - self._begun
        is_due = waited // REMIND_SECONDS > (self._checked - self._begun) // REMIND_SECONDS
        self._checked = now
        job = stored.summary(self.job_id)
        if not is_alive and not job.state.is_final and job.own_worker == self.worker_name:
            raise WorkerEndedError("the worker was stopped before the exploration had ended", 0)
        self._has_started = job.state != "queued"
        if is_due and not self._has_started:
            from bexp.storage.matching import STARTING  # noqa: PLC0415 - its imports would delay the worker's start

            reason = job.waiting_reason or STARTING
            say(f"not started after {waited:.0f} s: {reason}")

    def cancel(self, stored: StoredExplorations) -> None:
        """Cancel the exploration, and wait some seconds for its end; leave it if it is another worker's."""
        deadline = time.monotonic() + CANCEL_SECONDS
        job = stored.cancel(self.job_id, own_worker=self.worker_name, has_ended=self._worker.has_ended)
        if not (job.is_final or job.cancel_requested):
            say(f"exploration {self.job_id} goes on: another worker runs it")
            return
        say(f"cancelling exploration {self.job_id}")
        while not job.is_final and time.monotonic() < deadline:
            time.sleep(0.1)
            job = stored.get(self.job_id)


def usable_device_counts(request: ExplorationRequest) -> tuple[int, ...]:
    """Return the numbers of devices that a worker can use for a request, ascending. Other numbers leave devices idle.

    A worker with all of `num_devices` measures their communication. A worker with as many devices as share a sequence
    measures context parallelism. A worker with fewer devices uses a single one.
    """
    steps = (1, *request.devices.context_parallel_sizes, request.num_devices)
    return tuple(sorted({request.devices.needed(available) for available in steps}))


def _check_target(request: ExplorationRequest, device: str | None) -> None:
    """Raise CommandError if the worker that this command starts would not have the request's target."""
    name, installed = request.target_name, installed_targets()
    if name in installed or (device or "").startswith(RECORDED):
        return
    if name == TRANSFORMERS:
        hint = "pip install 'bexp[transformers]'"
        raise CommandError(ExitCode.USAGE, f"the target '{name}' needs the library {name}, which is missing: {hint}")
    has = ", ".join(describe_target(*item) for item in installed.items())
    meant = did_you_mean(name, [*installed, TRANSFORMERS])
    raise CommandError(
        ExitCode.USAGE, f"there is no target '{name}' here{meant}; there are {has}; a file is named as train.py:Target"
    )


def _check_kind_of_device(device: str | None, needed: str | None) -> None:
    """Raise CommandError if the only worker would own another kind of device than a stored request needs."""
    kind = options.device_kind(device)
    if None not in (kind, needed) and kind != needed:
        raise CommandError(ExitCode.USAGE, f"the exploration needs a {needed} device, and --device names {device}")


def _check_number_of_devices(device: str | None, needed: int) -> None:
    """Raise CommandError if the only worker would own too few devices: the exploration would wait for ever."""
    if device is None or device.startswith(RECORDED):
        return
    owned = len(named_devices(device))
    if owned < needed:
        message = f"the exploration needs {needed} devices, and --device {device} names {owned}"
        raise CommandError(ExitCode.USAGE, message, "restrict context_parallel.sizes or sharding, or name more devices")


def check_devices(owned: str | None) -> None:
    """Raise CommandError if the only worker would own a GPU that does not exist; it would end after some seconds."""
    gpus = [device for device in named_devices(owned) if device != "cpu"]
    if not gpus:
        return
    last = max(int(device.removeprefix("cuda:")) for device in gpus)
    from bexp.measure.nvml import visible_gpus  # noqa: PLC0415 - takes time, and only GPUs need it

    if last >= (number := len(visible_gpus(os.environ))):
        message = f"device 'cuda:{last}' does not exist: {number} CUDA devices are visible"
        raise CommandError(ExitCode.USAGE, message, "`bexp doctor` shows what can be used; --device cpu needs no GPU")


def named_devices(device: str | None) -> tuple[str, ...]:
    """Return the devices that an option names; none for a recorded table. Raises CommandError for anything else."""
    if device is None or device.startswith("replay"):
        return ()
    try:
        return parse_devices(device)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error
