"""Recording of a CUDA device's work as graphs that can be launched again."""

from __future__ import annotations

import gc
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor

from bexp.explorer.model.spelling import shortened

Work = Callable[[], None]

_TORCH_FOLDER = str(Path(torch.__file__).parent)


class NotCapturableError(RuntimeError):
    """The work cannot become a graph; the message says why, in one line."""


class Recorder(Protocol):
    """A recorder of a device's work, for repetition."""

    def find_problem(self, tensors: Sequence[Tensor]) -> str | None:
        """Return why work on `tensors` cannot be recorded; None if it can."""

    def warm_up(self, work: Work) -> None:
        """Run `work` until nothing is built, tuned or allocated for the first time any more.

        Afterwards the generators are as before, so that the same random numbers are drawn again.

        Raises:
            NotCapturableError: it waits for the device, or does something else that no graph can contain.
        """

    @property
    def pool_bytes(self) -> int:
        """Memory that the recorded work keeps for itself."""

    def record(self, works: Sequence[Work]) -> list[Work]:
        """Return functions that repeat each of `works`, which run in this order and share their memory.

        Tensors that the works leave behind have the values of the last repetition.

        Raises:
            NotCapturableError: the work cannot become a graph. Nothing of the attempt is left.
        """


class CudaRecorder:
    """A recorder on one CUDA device. All its graphs share a pool of memory, so only one may be in use at a time.

    See torch's notes on CUDA graphs (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs) for what a graph
    can contain.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None
        self._draws = False
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def find_problem(self, tensors: Sequence[Tensor]) -> str | None:
        """Require that all tensors are on one CUDA device."""
        devices = {tensor.device for tensor in tensors}
        if any(device.type != "cuda" for device in devices):
            names = ", ".join(sorted(device.type for device in devices))
            return f"CUDA graphs need a CUDA device, and the model is on: {names}"
        return "the model is spread over several devices" if len(devices) > 1 else None

    def warm_up(self, work: Work) -> None:
        """Run twice on another stream. The second run behaves as in a capture, and fails where it would wait."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        index = torch.cuda.current_device()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.random.fork_rng([index]), torch.cuda.stream(self._stream):
                before = torch.cuda.get_rng_state(index)
                work()
                self._draws = not torch.equal(before, torch.cuda.get_rng_state(index))
                with _as_if_capturing(draws=self._draws), _waiting_refused():
                    work()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model's own code runs here
            raise NotCapturableError(describe_error(error)) from error
        finally:
            torch.cuda.current_stream().wait_stream(self._stream)

    @property
    def pool_bytes(self) -> int:
        """Size of the pool, which serves nothing but the graphs, whether or not they run."""
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == tuple(self._pool))

    def record(self, works: Sequence[Work]) -> list[Work]:
        """Capture each of `works` as a graph."""
        gc.collect()
        if self._pool is None or not self._graphs:  # torch refuses a pool whose graphs are gone, if a tensor is left
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # blocks of the warm-up serve no graph
        graphs: list[Any] = []
        try:
            graphs.extend(map(self._capture, works))
        except Exception as error:  # the model's own code runs here
            graphs.clear()
            torch.cuda.synchronize()
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise NotCapturableError(describe_error(error)) from error
        self._graphs.update(graphs)
        return [graph.replay for graph in graphs]

    def _capture(self, work: Work) -> Any:
        graph = torch.cuda.CUDAGraph()
        random_state = torch.cuda.get_rng_state()
        with ExitStack() as stack:
            # Only this thread's calls end a capture: another thread may copy batches or ask for the clock meanwhile.
            stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(nullcontext() if self._draws else _without_random_states())
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:  # a capture must end, whatever broke it
                self._abandon(graph, random_state)
                raise
            try:
                graph.capture_end()
            except RuntimeError:
                self._repair(random_state)
                raise
        return graph

    def _abandon(self, graph: Any, random_state: Tensor) -> None:
        """End a capture whose work failed."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._repair(random_state)

    def _repair(self, random_state: Tensor) -> None:
        """Close the pool and free the generator that torch leaves behind where a capture cannot end."""
        index = torch.cuda.current_device()
        with suppress(RuntimeError):  # it was closed
            torch._C._cuda_endAllocateToPool(index, self._pool)
        with suppress(RuntimeError):
            torch._C._cuda_releasePool(index, self._pool)
        self._pool = None
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
        generator.set_state(random_state)


def describe_error(error: Exception) -> str:
    """Return an error in one line, with the place in the model's code where it happened."""
    text = shortened(" ".join(str(error).split()) or type(error).__name__, 200)
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_outside(frame.filename)]
    return f"{text} ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else text


def _is_outside(filename: str) -> bool:
    return not filename.startswith((_TORCH_FOLDER, str(Path(__file__).parent)))


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Make operations of torch raise if they wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _as_if_capturing(*, draws: bool) -> Iterator[None]:
    """Let code that asks whether it is being captured behave as in a capture."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        with _refused_random_states() if draws else _without_random_states():
            yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


@contextmanager
def _random_states(function: Callable[..., tuple[list[int], list[Tensor]]]) -> Iterator[None]:
    checkpoints: Any = torch.utils.checkpoint
    kept = checkpoints.get_device_states
    checkpoints.get_device_states = function
    try:
        yield
    finally:
        checkpoints.get_device_states = kept


def _without_random_states() -> Any:
    """Keep recomputation from saving the device's generator, which a capture may not read. Nothing draws from it."""
    return _random_states(lambda *_: ([], []))


def _refused_random_states() -> Any:
    def refuse(*_: Any) -> tuple[list[int], list[Tensor]]:
        raise NotCapturableError("recomputation would have to repeat random numbers (dropout) of an earlier graph")

    return _random_states(refuse)
