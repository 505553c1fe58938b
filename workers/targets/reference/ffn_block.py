"""The FFN blocks: a dense network of two matrices, gated or plain, or a mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bexp.explorer.cost.components import BlockRecompute
from bexp.explorer.model.model import ModelSpec
from bexp.kernels.activations import activate
from bexp.kernels.experts.capacity import ExpertsWithCapacity
from bexp.kernels.experts.expert_backend import ExpertFFN
from bexp.kernels.experts.registry import expert_backend
from bexp.kernels.router import route, score
from bexp.kernels.selective_recompute import recomputable
from bexp.workers.targets.reference.block import ResidualBlock, left_eager
from bexp.workers.targets.reference.norm import build_norm
from bexp.workers.targets.reference.weights import Weights


class MLP(nn.Module):
    """`act(x W) W'`, or `(act(x W_gate) * x W_up) W'` with gate and up projected together."""

    def __init__(self, model: ModelSpec, hidden_size: int, weights: Weights) -> None:
        super().__init__()
        width = 2 * hidden_size if model.gated_mlp else hidden_size
        self.activation, self.gated = model.activation, model.gated_mlp
        self.w_in = weights.normal(width, model.hidden_size)
        self.b_in = weights.normal(width) if model.mlp_bias else None
        self.w_out = weights.normal(model.hidden_size, hidden_size)
        self.b_out = weights.normal(model.hidden_size) if model.mlp_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to the same shape."""
        pre = recomputable(self._project, x, product=True)
        h = activate(pre, self.activation, gated=self.gated)
        return F.linear(h, self.w_out, self.b_out)

    def _project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w_in, self.b_in)


class DenseFFN(ResidualBlock):
    """A norm and an MLP."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        recompute: BlockRecompute,
        device: torch.device,
        training: bool,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(recompute=recompute, training=training)
        weights = Weights.of(model, device, training, generator)
        self.norm = build_norm(model, weights)
        self.mlp = MLP(model, model.ffn_hidden_size, weights)
        self.train(training)

    def core(self, x_BSD: Tensor) -> Tensor:
        """Return the branch of a tile."""
        out: Tensor = self.mlp(recomputable(self.norm, x_BSD))
        return out


class MoEFFN(ResidualBlock):
    """Experts behind a softmax router (Shazeer et al., 2017), with routes drawn beforehand.

    The router runs as in training: its matrix, softmax in float32, top-k, routing weights with their gradient. Only the
    result of top-k is given, so that a profile has the requested distribution. For that, the scores of the drawn
    experts are raised above all others. `set_routes` must be called before the first forward, and for each batch shape.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        backend: str,
        recompute: BlockRecompute,
        device: torch.device,
        training: bool,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(recompute=recompute, training=training)
        moe = model.moe
        assert moe is not None, "a model with experts"
        weights = Weights.of(model, device, training, generator)
        hidden, width = model.hidden_size, moe.expert_ffn_hidden_size
        self.activation = model.activation
        self.top_k, self.norm_topk_prob = moe.top_k, moe.norm_topk_prob
        self.backend = expert_backend(backend)
        self.run_experts: ExpertFFN = self.backend.forward
        if moe.capacity_factor is not None:
            self.run_experts = ExpertsWithCapacity(self.backend.forward, moe.capacity)
        self.norm = build_norm(model, weights)
        self.w_router = weights.normal(moe.num_experts, hidden)
        self.w_in = weights.normal(moe.num_experts, hidden, 2 * width if model.gated_mlp else width)
        self.w_out = weights.normal(moe.num_experts, width, hidden)
        shared = moe.shared_expert_ffn_hidden_size
        self.shared: nn.Module | None = MLP(model, shared, weights) if shared else None
        self.w_shared_gate = weights.normal(1, hidden) if moe.shared_expert_gate else None
        self.routes: Tensor | None = None
        self.is_spread = False
        self.train(training)

    def set_routes(self, routes_TK: Tensor) -> None:
        """Set each token's experts: int64 (B * S, top_k) on the block's device, distinct within a row."""
        assert routes_TK.shape[1] == self.top_k, "top_k experts a token"
        self.routes = routes_TK

    def spread(self, run_experts: ExpertFFN, w_router: nn.Parameter) -> None:
        """Make this the block of a rank with a part of the experts. `run_experts` computes all of the routes."""
        self.run_experts, self.w_router, self.is_spread = run_experts, w_router, True

    @property
    def spread_parameters(self) -> tuple[nn.Parameter, ...]:
        """The experts' matrices, if ranks have different ones."""
        return (self.w_in, self.w_out) if self.is_spread else ()

    def core(self, x_BSD: Tensor) -> Tensor:
        """Return the branch of a micro-batch."""
        h_BSD: Tensor = recomputable(self.norm, x_BSD)
        h_TD = h_BSD.flatten(0, 1)
        routes_TK, weights_TK, h_TD = self._route(h_TD)
        out = self.run_experts(h_TD, routes_TK, weights_TK, self.w_in, self.w_out, self.activation)
        if self.shared is not None:
            shared = self.shared(h_TD)
            out = out + (shared if self.w_shared_gate is None else self._gate(h_TD) * shared)
        return out.view(x_BSD.shape[0], -1, x_BSD.shape[2])

    def compile_core(self) -> None:
        """Compile the branch. Experts that are spread, have a capacity, or cannot be traced stay eager inside."""
        has_waits = self.is_spread or isinstance(self.run_experts, ExpertsWithCapacity)
        if has_waits or self.w_in.dtype not in self.backend.traceable_dtypes:
            self.run_experts = left_eager(self.run_experts)
        super().compile_core()

    def _route(self, h_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes and their weights, and the hidden states for the experts."""
        assert self.routes is not None, "routes are set before the first forward"
        assert self.routes.shape[0] == h_TD.shape[0], "routes for every token of the micro-batch"
        scores_TE, h_TD = score(h_TD, self.w_router)
        routes_TK, weights_TK = route(scores_TE, self.routes, norm_topk_prob=self.norm_topk_prob, dtype=h_TD.dtype)
        return routes_TK, weights_TK, h_TD

    def _gate(self, h_TD: Tensor) -> Tensor:
        assert self.w_shared_gate is not None
        return torch.sigmoid(F.linear(h_TD, self.w_shared_gate))
