"""How a run of a training step ended, and the agreement of its processes on that without a collective operation.

They write to the store that their process group was made with. The store still works when a collective operation has
failed on one process and not on another, or when a process has ended. Every wait here has a deadline.

A process that fails inside a collective operation leaves the others waiting in theirs. Therefore gloo groups have the
deadline of a running step as their timeout. NCCL communicators are aborted soon after another process has reported a
failure. Afterwards the numbers of operations that the groups have begun are compared. If they differ, the groups cannot
be used any more.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from bexp.explorer.records.measurement import Outcome
from bexp.measure.step_checks import StepError, is_finite
from bexp.out_of_memory import is_out_of_memory


@dataclass(frozen=True)
class Failure:
    """The reason why a size has no result."""

    outcome: Outcome
    reason: str


class _DeadlineError(BaseException):
    """Raised inside a step. It is a BaseException, so an `except Exception` in the step does not catch it."""


def attempt(run: Callable[[], Any], deadline_seconds: float) -> Failure | None:
    """Call `run`; return why it failed, or None if it did not.

    A tensor or float that `run` returns must be finite. The deadline works only in the main thread, and only if the
    step returns to Python now and then. A timer that the caller has set (`signal.setitimer`, `signal.alarm`) goes on
    afterwards with the time that is left; without any, it goes off at once.
    """
    try:
        with _deadline(deadline_seconds):
            if not is_finite(run()):
                return Failure(Outcome.CRASHED, "the loss is not finite")
    except _DeadlineError:
        return Failure(Outcome.TIMED_OUT, f"the step took longer than {deadline_seconds:g} s")
    except StepError as error:
        return Failure(Outcome.CRASHED, str(error))
    except Exception as error:  # noqa: BLE001 - the step is the caller's, and any failure of it is an outcome
        return Failure(Outcome.OUT_OF_MEMORY if is_out_of_memory(error) else Outcome.CRASHED, _first_line(error))
    return None


def release(device: torch.device) -> None:
    """Free the memory that a failed step left behind."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def expired(_signal: int, _frame: FrameType | None) -> None:
        raise _DeadlineError

    begun = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left > 0:  # zero would switch the caller's timer off
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 1e-6), interval)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


if dist.is_available():
    from torch.distributed import distributed_c10d as c10d

POLL_SECONDS = 0.01
GRACE_SECONDS = 5.0
"""How long a process may go on after another has failed, before its NCCL communicators are aborted."""
MARGIN_SECONDS = 10.0
_CALLS = itertools.count()
_STORES: list[Any] = []
"""Keeps the stores of groups that are aborted: the first process serves them, and others may still read them."""


class BrokenGroupError(RuntimeError):
    """The first process no longer answers, so that nothing can be agreed on."""


def num_processes() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Alone:
    """The only process."""

    is_leader = True
    group_is_usable = True

    def share(self, value: Any) -> Any:
        """Return the value of the leader."""
        return value

    def agree(self, failure: Failure | None, figures: list[float]) -> tuple[Failure | None, list[float]]:
        """Return the worst failure of all processes, and the largest of each figure."""
        return failure, figures

    @contextlib.contextmanager
    def guarded(self, grace_seconds: float) -> Iterator[None]:
        """Do nothing, because nobody waits for this process."""
        yield

    def close(self) -> None:
        """Do nothing, because no timeout was changed."""


class Together:
    """This process and those that it trains with. All of them must make the same calls in the same order."""

    def __init__(self, deadline_seconds: float) -> None:
        """Limit how long gloo waits for another process, until `close`."""
        self.group_is_usable = True
        self._deadline = deadline_seconds
        store: Any = c10d._get_default_store()
        if store not in _STORES:
            _STORES.append(store)
        self._store: Any = store.clone()
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._key = f"bexp/{next(_CALLS)}"
        self._number = 0
        self._timeouts = [(backend, backend.options._timeout) for backend in _gloo_backends()]
        for backend, _ in self._timeouts:
            backend._set_default_timeout(timedelta(seconds=deadline_seconds))

    @property
    def is_leader(self) -> bool:
        """Whether this is the process that decides what is measured."""
        return self._rank == 0

    def share(self, value: Any) -> Any:
        """Return the value of the leader, which must be JSON.

        Raises BrokenGroupError if the leader does not answer.
        """
        self._number += 1
        key = f"{self._key}/{self._number}/value"
        if self.is_leader:
            self._store.set(key, json.dumps([value]))
            return value
        return self._read(key, 2 * self._patience)

    def agree(self, failure: Failure | None, figures: list[float]) -> tuple[Failure | None, list[float]]:
        """Return the failure that counts for all processes, and the largest of each figure.

        A process that does not answer counts as crashed. Afterwards `group_is_usable` says whether all processes have
        begun the same collective operations.

        Raises BrokenGroupError if the leader does not answer.
        """
        own = {
            "outcome": Outcome.OK if failure is None else failure.outcome,
            "reason": None if failure is None else failure.reason,
            "is_first": failure is not None and self._store.add(f"{self._key}/{self._number}/failed", 1) == 1,
            "figures": figures,
            "operations": _operations(),
        }
        self._number += 1
        key = f"{self._key}/{self._number}"
        if self.is_leader:
            end = time.monotonic() + self._patience  # one for all, so that they still wait for the verdict
            statuses = [own, *(self._status(f"{key}/{rank}", rank, end) for rank in range(1, self._world_size))]
            self._store.set(f"{key}/verdict", json.dumps([_judge(statuses)]))
        else:
            self._store.set(f"{key}/{self._rank}", json.dumps([own]))
        verdict = self._read(f"{key}/verdict", 2 * self._patience)
        self.group_is_usable = self.group_is_usable and verdict["usable"]
        worst = Outcome(verdict["outcome"])
        return None if worst is Outcome.OK else Failure(worst, verdict["reason"]), verdict["figures"]

    @contextlib.contextmanager
    def guarded(self, grace_seconds: float) -> Iterator[None]:
        """Run a step that may exchange data. It ends soon after another process has failed, or at the deadline."""
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ended, grace_seconds), name="bexp-watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def close(self) -> None:
        """Give gloo its timeouts back."""
        for backend, timeout in self._timeouts:
            backend._set_default_timeout(timeout)

    @property
    def _patience(self) -> float:
        """The longest that another process may need: its own deadline, and that of what it waits for."""
        return 2 * self._deadline + MARGIN_SECONDS

    def _watch(self, ended: threading.Event, grace_seconds: float) -> None:
        """Abort NCCL's communicators when this process can only be waiting for others. Gloo has its timeout."""
        begun = time.monotonic()
        end = begun + self._deadline + 1.0
        key = f"{self._key}/{self._number}/failed"
        while not ended.wait(5 * POLL_SECONDS):
            if end > time.monotonic() + grace_seconds and self._has_failed(key):
                end = time.monotonic() + grace_seconds
            if time.monotonic() > end:
                _abort_nccl()
                return

    def _has_failed(self, key: str) -> bool:
        """Whether a process has failed, as it says under `key`, or because the one that holds the store has ended."""
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return True

    def _status(self, key: str, rank: int, end: float) -> dict[str, Any]:
        try:
            status: dict[str, Any] = self._read(key, end - time.monotonic())
        except BrokenGroupError:
            reason = f"process {rank} no longer answers"
            outcome = Outcome.CRASHED
            return {"outcome": outcome, "reason": reason, "is_first": True, "figures": None, "operations": None}
        return status

    def _read(self, key: str, seconds: float) -> Any:
        end = time.monotonic() + seconds
        try:
            while not self._store.check([key]) and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
            items = json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:  # the process that holds the store has ended
            raise BrokenGroupError(f"the first process of the group no longer answers: {error}") from error
        if items is None:
            raise BrokenGroupError("the first process of the group no longer answers")
        return items[0]


def _judge(statuses: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict on the statuses of all processes, in the order of their ranks.

    Memory that is short on one process counts first. Otherwise the first failure does, because others follow from it.
    """

    def severity(rank: int) -> tuple[bool, bool, bool]:
        each = statuses[rank]
        return each["outcome"] == Outcome.OUT_OF_MEMORY, each["is_first"], each["outcome"] != Outcome.OK

    worst = max(range(len(statuses)), key=severity)
    reason = statuses[worst]["reason"]
    failed = statuses[worst]["outcome"] != Outcome.OK
    begun: dict[str, int] = {}
    usable = all(each["operations"] is not None for each in statuses)
    for each in statuses:
        for group, number in (each["operations"] or {}).items():
            usable = usable and begun.setdefault(group, number) == number
    figures = [each["figures"] for each in statuses if each["figures"] is not None]
    return {
        "outcome": statuses[worst]["outcome"],
        "reason": f"{reason} (process {worst})" if failed else None,
        "figures": [] if failed else [max(values) for values in zip(*figures, strict=True)],
        "usable": usable,
    }


def _groups() -> list[tuple[str, Any]]:
    """The process groups of this process, by name."""
    return [(name, group) for group, name in c10d._world.pg_names.items() if group in c10d._world.pg_map]


def _gloo_backends() -> list[Any]:
    backends = []
    for _, group in _groups():
        for device in group._device_types:
            backend = group._get_backend(device)
            if backend.name() == "gloo" and backend not in backends:
                backends.append(backend)
    return backends


def _operations() -> dict[str, int] | None:
    """The number of collective operations that each group has begun; None if the groups were aborted."""
    groups = _groups()
    return {name: int(group._get_sequence_number_for_group()) for name, group in groups} if groups else None


def _abort_nccl() -> None:
    """End NCCL operations that wait for other processes. The groups are gone afterwards."""
    if any("nccl" in str(dist.get_backend(group)) for _, group in _groups()):
        c10d._abort_process_group()
