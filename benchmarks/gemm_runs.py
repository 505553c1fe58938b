"""Checks and times one contender on one case of the variable-sized GEMM table. A failure is an outcome."""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gemm_cases import Case
from benchmarks.gemm_contenders import BASELINES, CHOSEN, OURS, GemmPasses, Operands, Problem, problem
from benchmarks.isolation import Spoilt
from benchmarks.kernels import poisoned
from benchmarks.projected_errors import Reference, is_within, projected_errors, reference
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.spec.model import DType
from bexp.kernels.experts.auto.measuring import GemmShape
from bexp.kernels.experts.registry import AUTO_EXPERTS, expert_backend
from bexp.kernels.shapes import ExpertsShape
from bexp.measure.cuda_timing import CudaTimer
from bexp.measure.timing import BlockTimer, HostTimer, TimingBudget
from bexp.measure.turns import TurnsBudget, time_in_turns
from bexp.workers.profiler.failures import classify, is_poisoned
from bexp.workers.profiler.hardware import measure_hardware
from bexp.workers.targets.reference.shapes import torch_dtype

TOLERANCES = {DType.BFLOAT16: 1e-2, DType.FLOAT16: 2e-3, DType.FLOAT32: 1e-5}
"""Largest relative error in norm; float16's is bfloat16's times the ratio of their rounding errors, rounded up."""
WRONG, TOO_LARGE = "wrong", "operands_exceed_limit"
"""Outcomes beside those of a trial: a wrong result, and operands that are too large for every contender."""
CLOCK_BUDGET = TurnsBudget(rounds=5, chain_seconds=5e-3)
"""How often a loop of passes is timed by the clock, after the passes were timed one by one on the device."""
SLOW_SECONDS = 0.5
"""A pass that takes longer is timed once."""


class RunTimer(CudaTimer):
    """The time per case is short, because there are hundreds."""

    BUDGET = TimingBudget(min_repeats=5, max_repeats=30, seconds=0.15)
    MAX_WARM_UP_SECONDS = 0.1


class HostRunTimer(HostTimer):
    """The same on the host."""

    BUDGET = TimingBudget(min_repeats=3, max_repeats=10, seconds=0.05)
    MAX_WARM_UP_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """A run. `limit_bytes` is the memory of the smaller card that is imitated; null for all of the memory."""

    case: Case
    dtype: DType
    contender: str
    device: str
    limit_bytes: int | None = None
    context_bytes: int = 0
    timed: bool = True


class ForwardOnly(GemmPasses):
    """A forward without a graph and without a buffer for gradients."""

    training = False

    def forward(self) -> None:
        """Multiply."""
        with torch.no_grad():
            super().forward()


def contenders() -> dict[str, Callable[[Problem], Operands]]:
    """All of them, the baselines first."""
    return BASELINES | OURS | CHOSEN


def device_hardware(device: str) -> dict[str, Any]:
    """The measured device."""
    return measure_hardware(torch.device(device), None).model_dump(mode="json")


def run(task: Run) -> dict[str, Any] | Spoilt:
    """Return the outcomes of `forward` and `training` (forward, dX and dW), as `Spoilt` if the device is unusable."""
    device = torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    reason = unsupported_reason(task.contender, task.case, task.dtype, device)
    found: dict[str, Any]
    if reason is not None:
        found = {"outcome": Outcome.UNSUPPORTED.value, "reason": reason}
        return {"training": found, "forward": found}
    if task.contender in CHOSEN:
        shape = GemmShape(task.case.num_experts, task.case.k, task.case.n, torch_dtype(task.dtype))
        AUTO_EXPERTS.gemms.plan(shape, sum(task.case.counts), device, may=True)
    training = _attempt(task, device, training=True)
    spoilt = is_poisoned(device)
    if training["outcome"] == Outcome.OK:
        forward = {"outcome": training["outcome"], "errors": {"out": training["errors"]["out"]}}
        if "forward_seconds" in training:
            forward["seconds"] = training["forward_seconds"]
    elif spoilt:
        forward = training
    else:
        forward = _attempt(task, device, training=False)
        spoilt = is_poisoned(device)
    found = {"training": training, "forward": forward}
    return Spoilt(found) if spoilt else found


@functools.lru_cache(maxsize=64)
def unsupported_reason(contender: str, case: Case, dtype: DType, device: torch.device) -> str | None:
    """Return why the expert back end of this name refuses these sizes; null if it does not, or is no back end."""
    shape = ExpertsShape(
        hidden_size=case.k,
        ffn_hidden_size=case.n,
        num_experts=case.num_experts,
        top_k=case.top_k,
        dtype=torch_dtype(dtype),
        gated=False,
    )
    try:
        backend = expert_backend(contender)
    except ValueError:
        return None
    return backend.unsupported_reason(shape, device)


def _attempt(task: Run, device: torch.device, *, training: bool) -> dict[str, Any]:
    needed = task.case.operand_bytes(task.dtype.itemsize, training=training)
    if task.limit_bytes is not None and needed > task.limit_bytes - task.context_bytes:
        return {"outcome": TOO_LARGE, "operand_bytes": needed}
    try:
        return _checked_and_timed(task, device, training=training)
    except Exception as error:  # noqa: BLE001 - whatever a contender raises is its outcome
        outcome, reason = classify(error)
    finally:
        _release(device)
    if outcome is Outcome.CRASHED and not is_poisoned(device):
        outcome = Outcome.UNSUPPORTED  # it refused, and the device still works
    return {"outcome": outcome.value, "reason": reason}


def _checked_and_timed(task: Run, device: torch.device, *, training: bool) -> dict[str, Any]:
    wanted, timer = _reference(task.case, task.dtype, device), _timer(device)
    operands = contenders()[task.contender](_problem(task.case, task.dtype, device))
    if not training:  # a forward has no gradient, so its buffer must not count
        operands = replace(operands, grad=operands.grad.new_empty(0))
    _release(device)
    on_cuda, own = device.type == "cuda", _bytes(operands)
    outside = torch.cuda.memory_reserved(device) - own if on_cuda else 0
    held = torch.cuda.memory_allocated(device) - own if on_cuda else 0
    passes = GemmPasses(operands) if training else ForwardOnly(operands)
    with memory_limit(task, device, outside), poisoned():
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        passes.prepare_forward()
        passes.forward()
        if training:
            passes.backward()
        _synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else None
    assert passes.output is not None
    grads = None
    if training:
        assert operands.x.grad is not None
        assert operands.w.grad is not None
        grads = operands.x.grad, operands.w.grad
    errors = projected_errors(wanted, operands, passes.output.detach(), grads)
    del grads
    passes.prepare_forward()
    found: dict[str, Any] = {"errors": {name: e if math.isfinite(e) else None for name, e in errors.items()}}
    if peak is not None:
        found["peak_bytes"] = peak - held
    if not is_within(errors, TOLERANCES[task.dtype]):
        return found | {"outcome": WRONG}
    if task.timed:
        with memory_limit(task, device, outside):
            found |= _timed(passes, timer, device, task.case.flops(training=training))
    return found | {"outcome": Outcome.OK.value}


def _timed(passes: GemmPasses, timer: BlockTimer, device: torch.device, flops: int) -> dict[str, Any]:
    _synchronize(device)
    passes.prepare_forward()
    started = time.perf_counter()
    passes.forward()
    _synchronize(device)
    forward = time.perf_counter() - started
    if passes.training:
        passes.backward()
        _synchronize(device)
    seconds = time.perf_counter() - started
    if seconds > SLOW_SECONDS:
        once = {"seconds": seconds, "forward_seconds": forward, "repeats": 1}
        return once | {"flops_per_second": flops / seconds}
    timer.warm_up(passes)
    timing = timer.time(passes)
    clock = time_in_turns({"": partial(_run_once, passes)}, device, CLOCK_BUDGET)[""]
    return {
        "clock_seconds": clock.clock_seconds,
        "clock_error_seconds": clock.clock_error_seconds,
        "seconds": timing.device_seconds,
        "forward_seconds": timing.forward_device_seconds,
        "host_seconds": timing.host_seconds,
        "standard_error_seconds": timing.standard_error_seconds,
        "repeats": timing.repeats,
        "flops_per_second": flops / timing.device_seconds,
    }


def _run_once(passes: GemmPasses) -> None:
    passes.prepare_forward()
    passes.forward()
    if passes.training:
        passes.backward()


@contextmanager
def memory_limit(task: Run, device: torch.device, outside_bytes: int) -> Iterator[None]:
    """Limit torch's allocator to `limit` minus the device's context plus what only the benchmark holds."""
    if task.limit_bytes is None or device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = task.limit_bytes - task.context_bytes + outside_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _bytes(operands: Operands) -> int:
    """Of what the contender works on."""
    tensors = [t for t in (operands.x, operands.w, operands.grad, operands.rows) if t is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _problem(case: Case, dtype: DType, device: torch.device) -> Problem:
    """Make the same numbers for every contender again, so that one with its own layout does not hold them twice."""
    torch.manual_seed(0)
    return problem(case.counts, case.k, case.n, torch_dtype(dtype), device)


@functools.lru_cache(maxsize=2)
def _reference(case: Case, dtype: DType, device: torch.device) -> Reference:
    return reference(_problem(case, dtype, device))


@functools.cache
def _timer(device: torch.device) -> BlockTimer:
    return RunTimer(device) if device.type == "cuda" else HostRunTimer()


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
