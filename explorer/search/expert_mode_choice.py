"""The number of chunks, or of shadowed experts, that formulas expect to be the fastest for an expert block."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind, block_recompute
from bexp.explorer.cost.mesh_costs import BlockCost, DeviceShare, compose_layer
from bexp.explorer.cost.mesh_layers import MeshCandidate, MeshDecomposer
from bexp.explorer.dimensions.expert_modes import OVERLAP_DEGREES, SHADOWED_EXPERTS, ExpertMode
from bexp.explorer.dimensions.mesh import Mesh
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.model import LayerKind
from bexp.explorer.request.request import ExplorationRequest

PARTS = (2, 4, 8)
"""Parts of the best number of shadowed experts that may be tried as well: copies of fewer experts take less memory."""
SPARED = 0.01
"""More shadowed experts, or chunks, must save more than this share of the block's seconds; each costs memory."""


class ExpertModeChoice:
    """Turns a candidate in plain mode into one for each expert mode that the request explores.

    Routing decides how many experts are worth a copy, and the links how many chunks are worth their smaller matrix
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
