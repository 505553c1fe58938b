"""Expert blocks of one of the ranks that share the experts of a layer."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bexp.kernels.expert_parallel.experts import ExpertParallel
from bexp.kernels.experts.registry import expert_backend
from explorer.cost_model.components import Component
from explorer.spec.mesh import Mesh
from explorer.spec.model import ModelSpec
from explorer.spec.request import ExplorationRequest
from workers.targets.reference.moe_block import MoEFFN
from workers.targets.reference.routes import device_routes
from workers.targets.reference.weights import Weights


class SpreadExperts:
    """Builds the expert blocks of a rank, whose group of `mesh.expert` ranks passes tokens as the mesh says."""

    def __init__(self, group: dist.ProcessGroup, model: ModelSpec, mesh: Mesh) -> None:
        self._group, self._model, self._mesh = group, model, mesh

    def build(
        self, component: Component, request: ExplorationRequest, device: torch.device, generator: torch.Generator | None
    ) -> MoEFFN:
        """Return a block with this rank's experts and the router of all; its routes are not set yet."""
        model, moe, mesh = self._model, self._model.moe, self._mesh
        assert moe is not None, "a model with experts"
        assert component.backend is not None, "an expert component names its back end"
        local = moe.model_copy(update={"num_experts": moe.num_experts // mesh.expert})
        block = MoEFFN(
            model.model_copy(update={"moe": local}),
            backend=component.backend,
            recompute=component.recompute,
            device=device,
            training=True,
            generator=generator,
        )
        run = ExpertParallel(
            self._group,
            moe.num_experts,
            expert_backend(component.backend).forward,
            overlap_degree=mesh.overlap_degree,
            shadowed_experts=self._popular(component, request, device),
        )
        block.spread(run, Weights.of(model, device, True, generator).normal(moe.num_experts, model.hidden_size))
        return block

    def _popular(self, component: Component, request: ExplorationRequest, device: torch.device) -> tuple[int, ...]:
        """Return the experts that the most tokens of a micro-batch go to, in increasing order."""
        number, moe = self._mesh.shadowed_experts, self._model.moe
        if not number or moe is None:
            return ()
        tokens = component.micro_batch_size * self._model.seq_length
        routes = device_routes(self._model, request.routing, tokens, request.seed, device)
        counts = torch.bincount(routes.flatten(), minlength=moe.num_experts)
        return tuple(sorted(counts.topk(number).indices.tolist()))
