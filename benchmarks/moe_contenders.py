"""The contenders of the MoE layer benchmark: expert FFNs and layers on every back end, and dense counterparts."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from bexp.explorer.cost_model.components import BlockRecompute
from bexp.explorer.spec.model import ModelSpec, MoESpec
from bexp.explorer.spec.routing import RoutingSpec
from bexp.kernels.activations import Activation
from bexp.kernels.experts.auto.measuring import FFNShape
from bexp.kernels.experts.backend import ExpertFFN
from bexp.kernels.experts.registry import AUTO_EXPERTS, expert_backend, expert_support
from bexp.workers.targets.reference.compilation import compiled
from bexp.workers.targets.reference.ffn_block import DenseFFN
from bexp.workers.targets.reference.mlp import MLP
from bexp.workers.targets.reference.moe_block import MoEFFN
from bexp.workers.targets.reference.routes import device_routes
from bexp.workers.targets.reference.shapes import experts_shape
from bexp.workers.targets.reference.weights import Weights

HIDDEN, WIDTH = 2048, 1408
DENSE = ("dense eager", "dense compile")
LIGER, QUACK, AUTO = "liger", "quack", "auto"
_COMPILED = " compile"
_RECOMPUTING = " recomputing"


def layer_model(num_experts: int, top_k: int) -> ModelSpec:
    """A model of one layer; its dense FFN has the width of the active experts."""
    return ModelSpec(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=top_k * WIDTH,
        num_attention_heads=16,
        vocab_size=1024,
        seq_length=2048,
        moe=MoESpec(num_experts=num_experts, top_k=top_k, expert_ffn_hidden_size=WIDTH),
    )


def contenders(model: ModelSpec, device: torch.device) -> tuple[str, ...]:
    """Every back end that serves the model here, and liger-kernel's fused MoE where it is installed."""
    shape = experts_shape(model)
    assert shape is not None, "a model with experts"
    names = tuple(support.name for support in expert_support(shape, device) if support.usable)
    return (*names, LIGER) if _has_liger() else names


def prepare_auto(num_experts: int, top_k: int, num_tokens: int, device: torch.device) -> None:
    """Measure what the table of `auto` lacks for the experts, as `BEXP_MEASURE_EXPERTS` would at their first use."""
    shape = FFNShape(num_experts, top_k, HIDDEN, WIDTH, gated=True, dtype=torch.bfloat16)
    AUTO_EXPERTS.prepare(shape, [num_tokens], device)


def compiled_name(backend: str) -> str:
    """The layer on `backend` with everything around the experts compiled."""
    return backend + _COMPILED


def recomputing_name(backend: str) -> str:
    """The layer on `backend` that keeps no result but those of matrix products and of routing."""
    return backend + _RECOMPUTING


def hidden_states(micro_batch: int, seq_length: int, device: torch.device) -> Tensor:
    """Random (B, S, D)."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(micro_batch, seq_length, HIDDEN, dtype=torch.bfloat16, device=device, generator=generator)


class ExpertBlock(nn.Module):
    """Experts alone: tokens (T, D) to (T, D), with routes and routing weights drawn beforehand."""

    def __init__(self, name: str, model: ModelSpec, num_tokens: int, device: torch.device, seed: int) -> None:
        super().__init__()
        assert model.moe is not None
        weights = Weights.of(model, device, True, torch.Generator(device).manual_seed(seed))
        experts = model.moe.num_experts
        self.transposes = name == LIGER
        self.w_in = _stored(weights.normal(experts, HIDDEN, 2 * WIDTH), name)
        self.w_out = _stored(weights.normal(experts, WIDTH, HIDDEN), name)
        self.routes = device_routes(model, RoutingSpec(), num_tokens, seed, device)
        self.run = _run_of(name)
        self.router_weights = nn.Parameter(self.routing_weights(num_tokens))

    def routing_weights(self, num_tokens: int) -> Tensor:
        """(T, K), as a softmax over the chosen would give them."""
        generator = torch.Generator(self.w_in.device).manual_seed(2)
        shape = (num_tokens, self.routes.shape[1])
        scores = torch.randn(shape, device=self.w_in.device, generator=generator)
        return torch.softmax(scores, dim=-1).to(self.w_in.dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Run the experts."""
        return self.run(x_TD, self.routes, self.router_weights, self.w_in, self.w_out, "silu")


def expert_block(
    name: str, num_experts: int, top_k: int, num_tokens: int, device: torch.device, seed: int = 0
) -> ExpertBlock:
    """The experts alone on the back end `name`."""
    return ExpertBlock(name, layer_model(num_experts, top_k), num_tokens, device, seed)


def layer_block(name: str, num_experts: int, top_k: int, num_tokens: int, device: torch.device) -> MoEFFN:
    """The whole layer on the back end `name`, or with `compiled_name` or `recomputing_name`."""
    model = layer_model(num_experts, top_k)
    backend = name.removesuffix(_COMPILED).removesuffix(_RECOMPUTING)
    known = "loop" if backend == LIGER else backend
    recompute = BlockRecompute.ACTIVATIONS if name.endswith(_RECOMPUTING) else BlockRecompute.NONE
    block = MoEFFN(model, backend=known, recompute=recompute, device=device, training=True)
    block.run_experts = _run_of(backend)
    block.set_routes(device_routes(model, RoutingSpec(), num_tokens, 0, device))
    block.w_in, block.w_out = (_stored(w, backend) for w in (block.w_in, block.w_out))
    if name.endswith(_COMPILED):
        block.compile_core()
    return block


def dense_block(kind: str, top_k: int, device: torch.device, *, compiled: bool) -> nn.Module:
    """The dense layer, or the MLP alone, with the FLOPs of `top_k` experts."""
    model = layer_model(top_k, top_k)
    if kind == "layer":
        layer = DenseFFN(model, recompute=BlockRecompute.NONE, device=device, training=True)
        if compiled:
            layer.compile_core()
        return layer
    mlp = MLP(model, model.ffn_hidden_size, Weights.of(model, device, True))
    return _Compiled(mlp) if compiled else mlp


class _Compiled(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self._run = compiled(block.forward)

    def forward(self, x: Tensor) -> Any:
        return self._run(x)


def _stored(weight: nn.Parameter, backend: str) -> nn.Parameter:
    """The weights (E, K, N) as the back end takes them: liger (E, N, K), and quack (E, K, N) that is stored so."""
    if backend not in (LIGER, QUACK):
        return weight
    transposed = weight.detach().mT.contiguous()
    return nn.Parameter(transposed if backend == LIGER else transposed.mT)


def _run_of(name: str) -> ExpertFFN:
    if name == LIGER:
        return _liger
    return expert_backend(name).forward


def _has_liger() -> bool:
    if importlib.util.find_spec("liger_kernel") is None or importlib.util.find_spec("triton") is None:
        return False
    return importlib.util.find_spec("liger_kernel.ops.fused_moe") is not None


def _liger(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    """liger-kernel's fused MoE, whose weights are stored as (E, 2H, D) and (E, D, H)."""
    assert activation == "silu", "it supports only silu"
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    out: Tensor = function.apply(x_TD, w_in, w_out, routes_TK.to(torch.int32), weights_TK)
    return out
