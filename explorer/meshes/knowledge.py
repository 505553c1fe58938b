"""Candidates of meshes, each with a way to run a share of a micro-batch, and the knowledge about their blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind, block_recompute
from bexp.explorer.cost.step import memory_limit, required_bytes
from bexp.explorer.dimensions.attention import usable_attention
from bexp.explorer.dimensions.candidate import FIELDS, Candidate
from bexp.explorer.dimensions.expert_modes import OVERLAP_DEGREES, SHADOWED_EXPERTS, ExpertMode
from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.dimensions.place import usable_backends
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.meshes.costs import BlockCost, DeviceShare, TogetherCost, compose_layer
from bexp.explorer.meshes.layers import MeshCandidate, MeshDecomposer, optimizer_component
from bexp.explorer.meshes.legal import legal_meshes
from bexp.explorer.meshes.mesh import Mesh, MeshRun
from bexp.explorer.meshes.posterior import Expected
from bexp.explorer.meshes.shards import predict_shard_bytes, predict_shard_seconds
from bexp.explorer.meshes.step import MeshComposer, MeshStep
from bexp.explorer.meshes.transfers import Transfers, transfer_components
from bexp.explorer.model.model import LayerKind
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import CONTAMINATED_ATTEMPTS, ComponentMeasurement, Measurement, Outcome
from bexp.explorer.records.recommendation import WholeModelCheck, beside_whole
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import dimension_values, expressible

MOST_MESHES = 2000
"""The most meshes that are considered; of more, every second, every third and so on is."""
MOST_WITH_FEWER_COPIES = 1000
"""The most candidates of which each is also tried with fewer shadowed experts than formulas expect to be fastest."""
POLICIES = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
"""The policies of meshes if the request names none, as far as a named trainer has them."""
FORWARD_SHARE = 1 / 3
"""Share of a block's time that forward is expected to take."""
PREDICTED_ERROR = 0.3
"""Expected relative error of predicted seconds."""
OCTAVE_ERROR = 0.08
"""The same for a block next to one of its kind that was measured; it grows with every octave between their sizes."""
PREDICTED_SPARED, CALIBRATED_SPARED = 0.3, 0.1
"""By which share activations may be smaller than predicted, before and after a block of the same kind was measured."""
LEAST_ERROR = 0.005
"""Relative error of a measured block that counts at least."""


def mesh_candidates(request: ExplorationRequest, report: DeviceReport) -> tuple[MeshCandidate, ...]:
    """Return every mesh and candidate with expert mode `plain`, whether it fits or not.

    Meshes take the device's default kernels unless the request names others, and micro-batches that divide the batch.
    If the request names a trainer, that trainer can express all of them.

    Raises EmptySpaceError if no back end that the request names can be used here, or the trainer can express no
    candidate.
    """
    where = "on this device"
    attention = [report.default_attention]
    if request.attention_backends is not None or not request.flash_attention:
        attention = usable_attention(request, report, where)
    experts: list[str | None] = [report.default_experts if request.shapes.moe is not None else None]
    if request.expert_backends is not None:
        experts = [*usable_backends("expert back end", report.expert_backends, request.expert_backends, where)]
    policies = POLICIES if request.recompute is None else request.space.recompute_policies
    points = []
    meshes = legal_meshes(request)
    for mesh in meshes[:: -(-len(meshes) // MOST_MESHES)]:
        for m in request.space.all_micro_batch_sizes:
            number, rest = divmod(request.effective_batch_size, mesh.data * m)
            uneven = mesh.schedule is Schedule.INTERLEAVED and number % mesh.pipeline
            if rest or number < mesh.pipeline or uneven:
                continue
            for policy, attention_backend, expert_backend in product(policies, attention, experts):
                candidate = Candidate(
                    micro_batch_size=m,
                    recompute=policy,
                    attention_backend=attention_backend,
                    expert_backend=expert_backend,
                    num_query_groups=request.shapes.query_groups,
                    capacity_factor=request.shapes.variant.capacity_factor,
                )
                points.append(MeshCandidate(mesh, candidate))
    return expressible(points, attrgetter("sharded"), request, report)


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """A candidate with its step and the seconds to expect of it; `known` says that all its blocks are measured."""

    point: MeshCandidate
    step: MeshStep
    known: bool
    expected: Expected

    @property
    def tokens_per_second(self) -> float:
        """The tokens/s to expect of a device."""
        return self.step.tokens_per_second / self.expected.factor

    def compared_with(self, best: RankedCandidate) -> float:
        """The tokens/s to state of this candidate in comparison with the best."""
        is_composed = best.expected.is_own and not self.expected.is_own
        return beside_whole(self.tokens_per_second, best.tokens_per_second if is_composed else None)


class MeshKnowledge:
    """The candidates of meshes, with the measured costs of their blocks, or predicted and calibrated ones."""

    def __init__(self, request: ExplorationRequest, report: DeviceReport) -> None:
        self.request = request
        self.hardware = report.hardware
        self.limit_bytes = memory_limit(request, report.hardware)
        self._predicted: dict[Component, BlockCost] = {}
        self.measured: dict[Component, ComponentMeasurement] = {}
        bandwidth = report.hardware.memory_bandwidth_bytes_per_second
        plain = mesh_candidates(request, report)
        try_fewer = len(plain) <= MOST_WITH_FEWER_COPIES
        in_each_mode = ExpertModeChoice(request, self._decompose(), self.predicted, bandwidth, try_fewer=try_fewer)
        self.candidates = tuple(each for one in plain for each in in_each_mode(one))
        self.transfers = transfer_components(request, self._meshes)
        self.failed: dict[Component, str] = {}
        self.contaminated = Counter[Component]()
        self.expected: Callable[[MeshCandidate], Expected] = lambda point: Expected()
        """The ratio of a candidate's seconds by whole models to its composed ones."""
        self._costs = _CostTable(self)
        self.composer = self._compose()

    def _compose(self) -> MeshComposer:
        """Return a composer with the transfers that are measured until now."""
        request, optimizer = self.request, optimizer_component(tuple({mesh.tensor for mesh in self._meshes}))
        return MeshComposer(request.shapes, request, self._decompose(), optimizer, self.hardware)

    def _decompose(self) -> MeshDecomposer:
        measured = {
            component.exchange: (each.device_seconds, each.host_seconds)
            for component, each in self.measured.items()
            if component.exchange is not None
        }
        return MeshDecomposer(self.request.shapes, self.request, Transfers(measured, self.hardware.device_kind))

    @property
    def _meshes(self) -> tuple[Mesh, ...]:
        return tuple(dict.fromkeys(point.mesh for point in self.candidates))

    def learn(self, measurements: Iterable[ComponentMeasurement]) -> None:
        """Take in what a trial measured. A component that stays contaminated has failed."""
        new: dict[Component, ComponentMeasurement] = {}
        for each in measurements:
            if each.contamination is None:
                new[each.component] = each
                continue
            self.contaminated[each.component] += 1
            if self.contaminated[each.component] >= CONTAMINATED_ATTEMPTS:
                self.failed[each.component] = each.contamination
        self.measured |= new
        if any(component.exchange is not None for component in new):
            self.composer = self._compose()
        self._costs = _CostTable(self)

    def learn_failure(self, measurement: Measurement) -> None:
        """Take in which component has ended a trial, if one did."""
        if measurement.outcome not in {Outcome.OK, Outcome.CONTAMINATED} and measurement.failed_component is not None:
            reason = f"{measurement.outcome}: {measurement.reason or 'no reason given'}"
            self.failed[measurement.failed_component] = reason

    def missing(self, point: MeshCandidate) -> tuple[Component, ...]:
        """Return the components of a candidate that are not measured."""
        return tuple(c for c in self.composer.components(point) if c not in self.measured)

    def is_open(self, point: MeshCandidate) -> bool:
        """Return whether no component of a candidate has failed."""
        return not any(component in self.failed for component in self.composer.components(point))

    def step(self, point: MeshCandidate, *, simulate: bool = False, run: MeshRun | None = None) -> MeshStep:
        """Compose the step of a candidate from what is known now; `run` is that of a whole model."""
        return self.composer.step(point, self._costs, simulate=simulate, run=run)

    def ranked(self, point: MeshCandidate, *, simulate: bool = False) -> RankedCandidate:
        """Return a candidate with what is known of it now."""
        step, known = self.step(point, simulate=simulate), not self.missing(point)
        return RankedCandidate(point, step, known, self.expected(point))

    def predicted_step(self, point: MeshCandidate) -> MeshStep:
        """Compose the step of a candidate from formulas alone."""
        costs = {component: self.predicted(component) for component in self.composer.components(point)}
        return self.composer.step(point, costs, simulate=False)

    def spared_share(self, point: MeshCandidate) -> float:
        """Return by which share of its activations a candidate may need less than is known now."""
        return max(self._costs[component].spared_share for component in self.composer.components(point))

    def required_bytes(self, step: MeshStep, check: WholeModelCheck | None = None) -> int:
        """Return what the fullest rank needs of a device, by the peak of its whole model if that was run."""
        peak = step.memory.total if check is None else check.measurement.peak_bytes
        return required_bytes(peak, self.hardware, self.request.allocator)

    def error(self, component: Component) -> float:
        """Return the expected relative error of a component's seconds."""
        return self._costs[component].relative_error

    def predicted(self, component: Component) -> BlockCost:
        """Return the cost of a component by formulas alone."""
        if component not in self._predicted:
            seconds = predict_shard_seconds(component, self.request.shapes, self.request, self.hardware)
            sizes = predict_shard_bytes(component, self.request.shapes, self.request)
            cost = BlockCost(
                device_seconds=seconds.device,
                host_seconds=seconds.host,
                forward_share=FORWARD_SHARE,
                saved_bytes=sizes.saved,
                forward_peak_bytes=sizes.forward_peak,
                backward_peak_bytes=sizes.backward_peak,
                relative_error=PREDICTED_ERROR,
                spared_share=PREDICTED_SPARED,
            )
            self._predicted[component] = self.counted(cost)
        return self._predicted[component]

    def counted(self, cost: BlockCost) -> BlockCost:
        """Return a cost as steps count it. On a CPU host and device are one, and the longer seconds count."""
        if self.hardware.device_kind != "cpu":
            return cost
        return replace(cost, device_seconds=max(cost.device_seconds, cost.host_seconds), host_seconds=0.0)

    def summarize(self) -> dict[str, Any]:
        """Return the values of each dimension, as stored with the job."""
        meshes = self._meshes
        return {
            "num_query_groups": self.request.shapes.query_groups,
            "num_candidates": len(self.candidates),
            "num_meshes": len(meshes),
            **dimension_values([point.candidate for point in self.candidates], FIELDS),
            **dimension_values(meshes, [*Mesh.model_fields, "expert_mode"]),
        }


class _CostTable(dict[Component, BlockCost]):
    """Costs of components, filled as they are asked for."""

    def __init__(self, space: MeshKnowledge) -> None:
        super().__init__()
        self._space = space
        self._corrections: dict[ComponentKind, list[_Correction]] = {}
        for component, measurement in space.measured.items():
            if component.exchange is not None:
                continue
            expected = space.predicted(component)
            taken = max(measurement.device_seconds, measurement.host_seconds)
            slower = taken / max(expected.device_seconds, expected.host_seconds)
            larger = measurement.saved_bytes / max(1, expected.saved_bytes)
            self._corrections.setdefault(component.kind, []).append(_Correction(component, slower, larger or 1.0))

    def __missing__(self, component: Component) -> BlockCost:
        measurement = self._space.measured.get(component)
        if measurement is not None:
            self[component] = self._space.counted(_measured_cost(measurement))
            return self[component]
        cost = self._space.predicted(component)
        near = min(self._corrections.get(component.kind, ()), key=lambda one: one.distance(component), default=None)
        self[component] = cost if near is None else near.apply(component, cost)
        return self[component]


@dataclass(frozen=True, slots=True)
class _Correction:
    """The factors by which formulas of a measured block are too fast, and too small."""

    component: Component
    slower: float
    larger: float

    def distance(self, other: Component) -> float:
        """Return how unlike another block of the same kind is: octaves of its sizes, and one for another policy."""
        own = self.component
        octaves = sum(
            abs(math.log2(max(1, getattr(own, name)) / max(1, getattr(other, name))))
            for name in ("micro_batch_size", "tensor_parallel_size", "expert_parallel_size", "overlap_degree")
        )
        unlike = (own.recompute is not other.recompute, own.shadowed_experts != other.shadowed_experts)
        return octaves + sum(unlike) + (own.backend != other.backend)

    def apply(self, component: Component, cost: BlockCost) -> BlockCost:
        """Return the predicted costs of a block, corrected; the more unlike it is, the less is known."""
        return BlockCost(
            device_seconds=self.slower * cost.device_seconds,
            host_seconds=self.slower * cost.host_seconds,
            forward_share=cost.forward_share,
            saved_bytes=round(self.larger * cost.saved_bytes),
            forward_peak_bytes=round(self.larger * cost.forward_peak_bytes),
            backward_peak_bytes=round(self.larger * cost.backward_peak_bytes),
            relative_error=min(PREDICTED_ERROR, OCTAVE_ERROR * (1 + self.distance(component))),
            spared_share=CALIBRATED_SPARED,
        )


def _measured_cost(measurement: ComponentMeasurement) -> BlockCost:
    device = measurement.device_seconds
    return BlockCost(
        device_seconds=device,
        host_seconds=measurement.host_seconds,
        forward_share=measurement.forward_device_seconds / device if device else FORWARD_SHARE,
        saved_bytes=measurement.saved_bytes,
        forward_peak_bytes=measurement.forward_peak_bytes,
        backward_peak_bytes=measurement.backward_peak_bytes,
        relative_error=max(LEAST_ERROR, measurement.standard_error_seconds / device if device else 0.0),
        together=_together_cost(measurement),
    )


def _together_cost(measurement: ComponentMeasurement) -> TogetherCost | None:
    forward, backward = measurement.together_forward_seconds, measurement.together_backward_seconds
    if forward is None or backward is None:
        return None
    hosts = (measurement.waiting_forward_seconds or 0.0, measurement.together_host_backward_seconds or 0.0)
    return TogetherCost(forward, backward, *hosts)


PARTS = (2, 4, 8)
"""Parts of the best number of shadowed experts that may be tried as well: copies of fewer experts take less memory."""
SPARED = 0.01
"""More shadowed experts, or chunks, must save more than this share of the block's seconds; each costs memory."""


class ExpertModeChoice:
    """Turns a candidate in plain mode into one for each expert mode that the request explores.

    Routing decides how many experts are worth a copy. The links decide how many chunks are worth their smaller matrix
    products. Both depend on the expert block alone, which formulas time for every number that the request allows.
    """

    def __init__(
        self,
        request: ExplorationRequest,
        decompose: MeshDecomposer,
        predict: Callable[[Component], BlockCost],
        bandwidth: float,
        *,
        try_fewer: bool,
    ) -> None:
        """`try_fewer` also yields smaller numbers of shadowed experts than the fastest."""
        self._request = request
        self._decompose = decompose
        self._predict = predict
        self._bandwidth = bandwidth
        self._try_fewer = try_fewer
        self._settings: dict[tuple[object, ...], list[dict[str, int]]] = {}
        self._meshes: dict[tuple[Mesh, int, int], Mesh] = {}

    def __call__(self, point: MeshCandidate) -> Iterator[MeshCandidate]:
        """Yield the candidate in each mode; a mesh without expert parallelism has one alone."""
        if point.mesh.expert == 1:
            yield point
            return
        key = (point.mesh.tensor, point.mesh.expert, point.candidate)
        if key not in self._settings:
            modes = self._request.parallelism.expert_modes
            self._settings[key] = [setting for mode in modes for setting in self._best(point, mode)]
        for setting in self._settings[key]:
            yield point if not setting else MeshCandidate(self._mesh(point.mesh, **setting), point.candidate)

    def _mesh(self, mesh: Mesh, overlap_degree: int = 1, shadowed_experts: int = 0) -> Mesh:
        key = (mesh, overlap_degree, shadowed_experts)
        if key not in self._meshes:
            changes = {"overlap_degree": overlap_degree, "shadowed_experts": shadowed_experts}
            self._meshes[key] = mesh.model_copy(update=changes)
        return self._meshes[key]

    def _best(self, point: MeshCandidate, mode: ExpertMode) -> list[dict[str, int]]:
        """Return the numbers of a mode that are worth a candidate; none for `plain`."""
        if mode is ExpertMode.PLAIN:
            return [{}]
        asked = self._request.parallelism
        if mode is ExpertMode.OVERLAPPED:
            name, numbers = "overlap_degree", asked.named_overlap_degrees or OVERLAP_DEGREES
        else:
            moe = self._request.shapes.moe
            assert moe is not None, "a model with experts"
            name = "shadowed_experts"
            numbers = asked.named_shadowed_experts or tuple(n for n in SHADOWED_EXPERTS if n <= moe.num_experts)
        seconds = {number: self._seconds(point, **{name: number}) for number in numbers}
        best = numbers[0]
        for number in numbers[1:]:
            if seconds[number] < (1.0 - SPARED) * seconds[best]:
                best = number
        if mode is ExpertMode.OVERLAPPED or not self._try_fewer:
            return [{name: best}]
        plain = self._seconds(point)
        fewer = [max((n for n in numbers if n <= best // part and seconds[n] < plain), default=best) for part in PARTS]
        return [{name: number} for number in dict.fromkeys((best, *fewer))]

    def _seconds(self, point: MeshCandidate, **setting: int) -> float:
        """Return the seconds of the expert block in both directions."""
        mesh, candidate = self._mesh(point.mesh, **setting), point.candidate
        whole = candidate.recompute is Recompute.FULL
        policy = block_recompute(candidate.recompute, ComponentKind.MOE_FFN, None)
        component = Component(
            kind=ComponentKind.MOE_FFN,
            micro_batch_size=candidate.micro_batch_size,
            recompute=BlockRecompute.FULL if whole else policy,
            backend=candidate.expert_backend,
            tensor_parallel_size=mesh.tensor,
        )
        block = self._decompose.expert_block(mesh, component)
        share = DeviceShare(self._decompose.hidden_bytes(candidate), self._bandwidth)
        costs = {block.component: self._predict(block.component)}
        return compose_layer((block,), costs, share, mesh, (LayerKind.MOE, whole)).seconds
