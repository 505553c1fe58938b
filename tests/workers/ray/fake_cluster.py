"""A stand-in for the module `ray`: a cluster of threads with two CPUs, for hosts that cannot run Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from types import SimpleNamespace
from typing import Any

from tests.workers.ray.fakes import FakeActorProfiler


class FakeRayError(Exception):
    pass


class FakeActorHandle:
    """Runs the calls of an actor one after another, in a thread."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._made = self._thread.submit(make)

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Future[Any]:
            return self._thread.submit(lambda: getattr(self._made.result(), name)(*arguments))

        return SimpleNamespace(remote=remote)

    def end(self) -> None:
        """Remove the actor's folder, too, which a killed process would leave behind."""
        self._thread.submit(lambda: self._made.result().close()).result()
        self._thread.shutdown()


class FakeRay:
    """What `bexp.workers.ray` uses of Ray."""

    exceptions = SimpleNamespace(RayError=FakeRayError)

    def __init__(self, num_cpus: int = 2) -> None:
        self.num_killed = 0
        self._num_cpus = num_cpus

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self._num_cpus)}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "0123456789abcdef")

    def remote(self, actor_class: Callable[..., Any]) -> Any:
        def make(*arguments: Any) -> FakeActorHandle:
            return FakeActorHandle(lambda: actor_class(*arguments))

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=make))

    def wait(self, references: Sequence[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        condition = FIRST_COMPLETED if num_returns == 1 else ALL_COMPLETED
        done, rest = wait_for_futures(references, timeout, condition)
        return list(done), list(rest)

    def get(self, reference: Future[Any]) -> Any:
        try:
            return reference.result()
        except RuntimeError as error:
            raise FakeRayError(str(error)) from error

    def kill(self, actor: FakeActorHandle) -> None:
        self.num_killed += 1
        actor.end()


class UnlikeProfilers:
    """Opens profilers of devices that differ in memory."""

    def __init__(self) -> None:
        self.num_opened = 0

    def __call__(self, *_: object) -> FakeActorProfiler:
        self.num_opened += 1
        return FakeActorProfiler(memory_bytes=10**10 + self.num_opened)
