"""A device and a model that are drawn from a seed: the truth that the search never sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.unseen.draws import Draws
from benchmarks.unseen.kernels import Kernels
from benchmarks.unseen.models import GIB, STATE_SHARE, draw_report, draw_request
from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition, Floats, Mask, predict_memory, required_table
from bexp.explorer.cost.step import memory_limit
from bexp.explorer.dimensions.bta_tile import BTASpec
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.experts import WAITING_EXPERTS
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import PrunedSpace, prune_space

MEMORY_MODEL_STD, MEMORY_OWN_STD = 0.012, 0.016
"""Relative errors of a composed peak: one that a model's candidates share, and a candidate's own; 2% together."""
FRAGMENTATION_STD = {"default": 0.02, "expandable_segments": 0.008}
"""Scale of what an allocator cannot place, as a share of the peak; half as much again for a peak of 4 GiB."""
PRESSURE_SHARE = 0.985
"""Beyond this share of the limit some devices are slower: the allocator gives memory back and takes it again."""
FEWEST_CANDIDATES = 12
MOST_DRAWS = 50


@dataclass(frozen=True)
class UnseenTruth:
    """What is true of every candidate, in the rows of `table`. Axes: C candidates, K components.

    `tokens_C` is the mean throughput of the whole model, composition error included; it is 0 where the true peak with
    fragmentation, context and margin exceeds the limit. `lasts_C` says which whole models run at all, `admitted_C`
    which candidates fit as composed. The search may recommend no other, although a composed peak may be too high.
    """

    name: str
    seed: int
    request: ExplorationRequest
    report: DeviceReport
    prune: PrunedSpace
    table: Composition
    tokens_C: Floats  # noqa: N815 - axes are in names
    speed_C: Floats  # noqa: N815 - axes are in names
    peak_C: Floats  # noqa: N815 - axes are in names
    lasts_C: Mask  # noqa: N815 - axes are in names
    admitted_C: Mask  # noqa: N815 - axes are in names
    micro_step_C: Floats  # noqa: N815 - axes are in names
    optimizer_C: Floats  # noqa: N815 - axes are in names
    device_K: Floats  # noqa: N815 - axes are in names
    host_K: Floats  # noqa: N815 - axes are in names
    sizes_3K: Floats  # noqa: N815 - axes are in names

    @property
    def best(self) -> float:
        """Tokens/s of the best candidate that fits."""
        return float(self.tokens_C.max())

    def regret(self, candidate: Candidate | None) -> float:
        """Share of the best throughput that a recommendation gives away; 1 for none, or if its whole model fails."""
        if candidate is None or candidate not in self.table.row or not self.lasts_C[self.table.row[candidate]]:
            return 1.0
        return max(0.0, 1.0 - float(self.speed_C[self.table.row[candidate]]) / self.best)

    def regret_of_admitted(self, candidate: Candidate | None) -> float:
        """The regret against the best of the candidates that fit as composed; against all if none of them fits."""
        best = float(np.where(self.admitted_C, self.tokens_C, 0.0).max()) or self.best
        return max(0.0, 1.0 - (1.0 - self.regret(candidate)) * self.best / best)

    def is_within_tolerance(self, candidate: Candidate) -> bool:
        """Whether a candidate is within the tolerance of the best, whose probability a confidence states."""
        return self.regret(candidate) <= self.request.tolerance


def draw_truth(
    seed: int,
    *,
    executions: Sequence[Execution] | None = None,
    num_sizes: int | None = None,
    change: Callable[[ExplorationRequest], ExplorationRequest] | None = None,
) -> UnseenTruth:
    """Return the device and the model of a seed.

    Models that are too large for their device are drawn again. With `executions` the request chooses among them, and
    everything else about the device stays the same. With `num_sizes` it has only so many micro-batch sizes, a factor
    of 2 apart where they can be. `change` is applied to the request last, and may change its loss.

    Raises:
        EmptySpaceError: the changed request admits no candidate.
        RuntimeError: no draw fits, which would be an error of the generator.
    """
    for attempt in range(MOST_DRAWS):
        draws = Draws(MOST_DRAWS * seed + attempt)
        request = draw_request(draws)
        report = draw_report(draws, request)
        try:
            request = _limit_memory(draws, request, report)
            prune = prune_space(request.shapes, request, report)
        except EmptySpaceError:
            continue
        if prune.table is None or len(prune.legal.candidates) < FEWEST_CANDIDATES:
            continue
        if prune.table.static_bytes_C.min() > STATE_SHARE * memory_limit(request, report.hardware):
            continue
        truth = _complete(seed, draws, request, report, prune, prune.table)
        if np.any(truth.tokens_C > 0) and (executions is not None or num_sizes is not None or change is not None):
            request = request if num_sizes is None else _narrowed(request, report, prune, num_sizes)
            request = request.model_copy(update={"executions": executions})
            request = request if change is None else change(request)
            prune = prune_space(request.shapes, request, report)
            if prune.table is None:
                raise EmptySpaceError("nothing is predicted to fit")
            truth = _complete(seed, draws, request, report, prune, prune.table)
            if change is not None:
                return truth
        if np.any(truth.tokens_C > 0):
            return truth
    raise RuntimeError(f"no model fits its device with seed {seed}")


def _limit_memory(draws: Draws, request: ExplorationRequest, report: DeviceReport) -> ExplorationRequest:
    """Return the request with a limit that cuts through its space, in half of all draws."""
    table = prune_space(request.shapes, request, report).table
    if table is None or draws.happens(0.5, "all fit"):
        return request
    required_C = predict_memory(table, report.hardware)
    limit = float(np.quantile(required_C, draws.between(0.3, 0.95, "limit")))
    return request.model_copy(update={"memory_limit_gib": limit / GIB})


def _narrowed(
    request: ExplorationRequest, report: DeviceReport, prune: PrunedSpace, num_sizes: int
) -> ExplorationRequest:
    """Return the request with the `num_sizes` smallest powers of 2 of its space, and one value of the other dimensions.

    The experts are the first that a graph can contain, if there are any.
    """
    legal = [c for c in prune.legal.candidates if c.bta_tile is None]
    policy = min((c.recompute for c in legal), key=request.space.recompute_policies.index)
    sizes = {c.micro_batch_size for c in legal if c.recompute is policy}
    experts = sorted(request.expert_backends or (), key=WAITING_EXPERTS.__contains__)
    narrow = {
        "micro_batch_size": tuple(sorted(m for m in sizes if m & (m - 1) == 0)[:num_sizes]),
        "bta": BTASpec(enable=False),
        "recompute": (policy,),
        "attention_backends": (report.default_attention,),
        "expert_backends": tuple(experts[:1]) or None,
    }
    return request.model_copy(update=narrow)


def _complete(
    seed: int, draws: Draws, request: ExplorationRequest, report: DeviceReport, prune: PrunedSpace, table: Composition
) -> UnseenTruth:
    kernels = Kernels(draws, report.hardware)
    return complete(seed, draws, request, report, prune, table, lambda c: kernels.seconds(c, request.shapes))


def complete(
    seed: int,
    draws: Draws,
    request: ExplorationRequest,
    report: DeviceReport,
    prune: PrunedSpace,
    table: Composition,
    seconds: Callable[[Component], tuple[float, float]],
) -> UnseenTruth:
    """Return what is true of every candidate of `table`, given device and host seconds of each component."""
    hardware, model = report.hardware, table.model
    pairs = [seconds(component) for component in table.components]
    device_K, host_K = np.array([d for d, _ in pairs]), np.array([h for _, h in pairs])
    sizes_3K = np.array([_sizes(draws, component, model, request) for component in table.components]).T
    peak_C = (table.static_bytes_C + np.add(*table.activation_bytes(*sizes_3K))) * _memory_factors(draws, table)
    limit = memory_limit(request, hardware)
    lasts_C = peak_C * (1.0 + _fragmentation(draws, table, peak_C)) + hardware.context_bytes <= limit
    fits_C = lasts_C & (required_table(table, peak_C - table.static_bytes_C, hardware) <= limit)
    factor_C = _composition_factors(draws, table)
    if draws.happens(0.4, "memory pressure"):
        factor_C = factor_C * np.where(peak_C > PRESSURE_SHARE * limit, draws.between(1.02, 1.1, "pressure"), 1.0)
    micro_step_C = table.micro_step_seconds(device_K[None, :], host_K)[0] * factor_C
    optimizer_C = table.optimizer_seconds(device_K[None, :], host_K)[0]
    step_C = request.effective_batch_size / table.micro_batch_C * micro_step_C + optimizer_C
    speed_C = request.effective_batch_size * model.seq_length / step_C
    members = set(prune.legal.candidates)
    legal_C = np.array([candidate in members for candidate in table.candidates])
    return UnseenTruth(
        name=f"unseen-{seed}",
        seed=seed,
        request=request,
        report=report,
        prune=prune,
        table=table,
        tokens_C=np.where(legal_C & fits_C, speed_C, 0.0),
        speed_C=speed_C,
        peak_C=peak_C,
        lasts_C=lasts_C,
        admitted_C=required_table(table, np.add(*table.activation_bytes(*sizes_3K)), hardware) <= limit,
        micro_step_C=micro_step_C,
        optimizer_C=optimizer_C,
        device_K=device_K,
        host_K=host_K,
        sizes_3K=sizes_3K,
    )


def _sizes(
    draws: Draws, component: Component, model: ExploredModel, request: ExplorationRequest
) -> tuple[float, float, float]:
    """Return measured bytes: off the prediction by similar, with a workspace from some size on."""
    predicted = predict_component_bytes(component, model, request)
    sort = (component.kind, component.backend, component.recompute)
    factor = math.exp(0.08 * draws.normal("bytes", *sort, component.bta_tile is None))
    threshold = draws.scale_between(2, 64, "workspace from", component.kind, component.backend)
    workspace = draws.between(0.0, 0.3, "workspace", component.kind) * GIB * (component.micro_batch_size > threshold)
    return (
        factor * predicted.saved,
        factor * predicted.forward_peak + workspace,
        factor * predicted.backward_peak + workspace,
    )


def _memory_factors(draws: Draws, table: Composition) -> Floats:
    shared = MEMORY_MODEL_STD * draws.normal("memory")
    own = [MEMORY_OWN_STD * draws.normal("memory", candidate.describe()) for candidate in table.candidates]
    return np.asarray(np.exp(shared + np.array(own)))


def _fragmentation(draws: Draws, table: Composition, peak_C: Floats) -> Floats:
    scale_C = FRAGMENTATION_STD[table.request.allocator] * (1.0 + 2.0 * GIB / peak_C)
    drawn = [abs(draws.normal("fragmentation", candidate.describe())) for candidate in table.candidates]
    return np.asarray(scale_C * np.array(drawn))


def _composition_factors(draws: Draws, table: Composition) -> Floats:
    """Return whole over composed seconds: shared, of a policy, of a size, and heavy-tailed of each candidate's own.

    CUDA graphs replay the same kernels, so they share all of that. They leave out gaps between kernels, but their
    memory lies elsewhere: they differ by a little, some of it by candidate. Compiled code shares less.
    """
    own = draws.scale_between(0.002, 0.005, "composition scale")
    shared = 0.02 * draws.normal("composition")
    replayed = draws.between(-0.01, 0.005, "composition", "replayed")
    logs = []
    for c in table.candidates:
        name = c.model_copy(update={"execution": None}).describe()
        log = shared + 0.004 * draws.normal("composition", c.recompute, c.bta_tile is None)
        log += 0.003 * draws.normal("composition", c.micro_batch_size) + own * draws.heavy("composition", name)
        if c.execution is not None and c.execution.compiles:
            log += 0.01 * draws.normal("composition", "compiled") + 0.5 * own * draws.heavy(
                "composition", "compiled", name
            )
        if c.execution is not None and c.execution.replays:
            log += replayed + 0.3 * own * draws.heavy("composition", "replayed", name)
        logs.append(log)
    return np.asarray(np.exp(np.array(logs)))
