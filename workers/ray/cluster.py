"""A connection to a Ray cluster, and the actors and trials that it has for this process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bexp.explorer.records.trial import TrialTask
from bexp.workers.process.interface import ProfilerError
from bexp.workers.ray.actor import Actor, OpenProfiler


@dataclass(eq=False)
class RunningTrial:
    """A trial, the number of actors that it has lost, and Ray's reference to its result with its deadline."""

    task: TrialTask
    losses: int = 0
    result: Any = None
    deadline: float = 0.0


@dataclass(eq=False)
class ActorHandle:
    """The handle of an actor: `pending` is the answer to its first commands, `trial` the trial that it runs."""

    actor: Any
    placement_group: Any
    pending: Any = None
    node: str | None = None
    restarts: int = 0
    trial: RunningTrial | None = None


class Cluster:
    """A connection to a cluster.

    Args:
        address: of the cluster, as `ray.init` takes it; `auto`: the one that this host belongs to.
        devices: what an actor needs, as one host names it: `cpu`, `cuda:0`, or several GPUs of one host.
        open_profiler: makes the profiler of an actor, on the actor's node.
    """

    def __init__(self, address: str, devices: Sequence[str], open_profiler: OpenProfiler) -> None:
        if not devices or ("cpu" in devices and len(devices) > 1):
            raise ValueError("a trial on the cluster needs one CPU, or one or more GPUs")
        self.address = address
        self.kind = "CPU" if devices[0] == "cpu" else "GPU"
        # Ray shows an actor only its own GPUs, and counts them from 0.
        self._devices = ("cpu",) if self.kind == "CPU" else tuple(f"cuda:{i}" for i in range(len(devices)))
        self._open_profiler = open_profiler
        self._ray: Any = None
        self._owns_connection = False

    @property
    def is_connected(self) -> bool:
        """Whether `connect` was called, and `disconnect` was not called since."""
        return self._ray is not None

    @property
    def errors(self) -> type[Exception]:
        """The class of all errors of Ray."""
        error: type[Exception] = self._ray.exceptions.RayError
        return error

    def connect(self) -> None:
        """Connect, unless this is done.

        Raises:
            ProfilerError: Ray is not installed, or the cluster cannot be reached.
        """
        if self._ray is not None:
            return
        # Ray reads it when it is imported. Without it SIGTERM ends the worker at once, and its job waits for the lease.
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise ProfilerError("Ray is not installed: pip install 'bexp[ray]'") from error
        if not ray.is_initialized():
            try:
                ray.init(address=self.address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ProfilerError(f"the Ray cluster {self.address} cannot be reached: {error}") from error
            self._owns_connection = True
        self._ray = ray

    def disconnect(self) -> None:
        """Leave the cluster, if this object connected to it."""
        if self._owns_connection:
            self._ray.shutdown()
        self._ray, self._owns_connection = None, False

    def count_places(self) -> int:
        """Return the number of actors for which the cluster has devices."""
        return int(self._ray.cluster_resources().get(self.kind, 0.0)) // len(self._devices)

    def start_actor(self) -> ActorHandle:
        """Ask for an actor. It reports when the cluster has devices for it."""
        number = len(self._devices)
        group, options = None, {"scheduling_strategy": "SPREAD"}
        if number > 1:  # all devices on one host, or none
            group = self._ray.util.placement_group([{"GPU": number, "CPU": 1}], strategy="STRICT_PACK")
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            options = {"scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(placement_group=group)}
        gpus = number if self.kind == "GPU" else 0
        actor_class = self._ray.remote(Actor).options(num_cpus=1, num_gpus=gpus, max_restarts=0, **options)
        actor = actor_class.remote(self._devices, self._open_profiler)
        return ActorHandle(actor, group, pending=actor.introduce.remote())

    def end_actor(self, handle: ActorHandle) -> None:
        """Kill an actor and give its devices back."""
        self._ray.kill(handle.actor)
        if handle.placement_group is not None:
            self._ray.util.remove_placement_group(handle.placement_group)

    def wait(self, references: Sequence[Any], seconds: float, *, number: int = 1) -> list[Any]:
        """Wait for the values of `number` references, for `seconds` at most; return those that are ready."""
        done, _ = self._ray.wait(list(references), num_returns=number, timeout=seconds)
        return list(done)

    def get(self, reference: Any) -> Any:
        """Return the value of a reference. Raises one of `errors` if its actor failed."""
        return self._ray.get(reference)


def describe_error(error: BaseException) -> str:
    """Return the last line of Ray's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
