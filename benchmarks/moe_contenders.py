"""The contenders of the MoE layer benchmark: layers on every back end, dense ones, and how results are checked."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contenders.registry import COMPARED, contender, usable_contenders
from benchmarks.expert_reference import expert_ffn, relative_error
from bexp.explorer.cost_model.components import BlockRecompute
from bexp.explorer.spec.model import ModelSpec, MoESpec
from bexp.explorer.spec.routing import RoutingSpec
from bexp.kernels.activations import Activation
from bexp.kernels.experts.auto.measuring import FFNShape
from bexp.kernels.experts.expert_backend import ExpertFFN
from bexp.kernels.experts.registry import AUTO_EXPERTS
from bexp.measure.passes import ModulePasses
from bexp.workers.instruments.kernel_shapes import experts_shape
from bexp.workers.targets.reference.ffn_block import DenseFFN
from bexp.workers.targets.reference.moe_block import MoEFFN
from bexp.workers.targets.reference.routes import device_routes
from bexp.workers.targets.reference.weights import Weights

HIDDEN, WIDTH = 2048, 1408
SEQ_LENGTH = 2048
TOLERANCE = 1e-2
"""Of relative errors against float64."""
DENSE = ("dense eager", "dense compile")
LIGER, QUACK, AUTO = "liger", "quack", "auto"
_COMPILED = " compile"


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
    names = usable_contenders(shape, device)
    return (*names, LIGER) if _has_liger() else names


def prepare_auto(num_experts: int, top_k: int, num_tokens: int, device: torch.device) -> None:
    """Measure what the table of `auto` lacks for the experts, as `BEXP_MEASURE_EXPERTS` would at their first use."""
    shape = FFNShape(num_experts, top_k, HIDDEN, WIDTH, gated=True, dtype=torch.bfloat16)
    AUTO_EXPERTS.prepare(shape, [num_tokens], device)


def compiled_name(backend: str) -> str:
    """The layer on `backend` with everything around the experts compiled."""
    return backend + _COMPILED


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
    """The whole layer on the back end `name`, or with `compiled_name`."""
    model = layer_model(num_experts, top_k)
    backend = name.removesuffix(_COMPILED)
    known = "loop" if backend == LIGER or backend in COMPARED else backend
    block = MoEFFN(model, backend=known, recompute=BlockRecompute.NONE, device=device, training=True)
    block.run_experts = _run_of(backend)
    block.set_routes(device_routes(model, RoutingSpec(), num_tokens, 0, device))
    block.w_in, block.w_out = (_stored(w, backend) for w in (block.w_in, block.w_out))
    if name.endswith(_COMPILED):
        block.compile_core()
    return block


def dense_block(top_k: int, device: torch.device, *, compiled: bool) -> DenseFFN:
    """The dense layer with the FLOPs of `top_k` experts."""
    layer = DenseFFN(layer_model(top_k, top_k), recompute=BlockRecompute.NONE, device=device, training=True)
    if compiled:
        layer.compile_core()
    return layer


class FreshGradients(ModulePasses):
    """Passes whose backward writes the gradients of the weights instead of adding to earlier ones."""

    def __init__(self, block: nn.Module, *inputs: Tensor) -> None:
        hidden_states = tuple(x.detach().requires_grad_() for x in inputs)
        super().__init__(block, hidden_states, training=True, gradient_dtype=torch.bfloat16)

    def prepare_forward(self) -> None:
        """Forget the last gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None
        super().prepare_forward()


def check(num_experts: int, top_k: int, device: torch.device) -> list[dict[str, Any]]:
    """Relative errors against float64, of the output and of every gradient, at a micro-batch of one."""
    x = hidden_states(1, SEQ_LENGTH, device).view(SEQ_LENGTH, -1)
    gradient = torch.randn_like(x)
    rows = []
    reference: dict[str, Tensor] = {}
    for name in ("float64", *contenders(layer_model(num_experts, top_k), device)):
        block = expert_block(name if name != "float64" else "loop", num_experts, top_k, SEQ_LENGTH, device, seed=1)
        inputs = {"x": x, "weights": block.routing_weights(SEQ_LENGTH), "w_in": block.w_in, "w_out": block.w_out}
        dtype = torch.float64 if name == "float64" else torch.bfloat16
        leaves = {key: value.detach().to(dtype).requires_grad_() for key, value in inputs.items()}
        run = expert_ffn if name == "float64" else block.run
        arguments = (leaves["x"], block.routes, leaves["weights"], leaves["w_in"], leaves["w_out"])
        out = run(*arguments, "silu")
        out.backward(gradient.to(dtype))
        tensors = {"out": out.detach()} | {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
        if name == "float64":
            reference = tensors
            continue
        if block.transposes:
            tensors = {key: value.transpose(1, 2) if key.startswith("w_") else value for key, value in tensors.items()}
        for key, value in tensors.items():
            error = relative_error(value, reference[key])
            rows.append({"num_experts": num_experts, "top_k": top_k, "backend": name, "of": key, "error": error})
        del out, leaves, tensors, block
        torch.cuda.empty_cache()
    return rows


def _stored(weight: nn.Parameter, backend: str) -> nn.Parameter:
    """The weights (E, K, N) as the back end takes them: liger (E, N, K), and quack (E, K, N) that is stored so."""
    if backend not in (LIGER, QUACK):
        return weight
    transposed = weight.detach().mT.contiguous()
    return nn.Parameter(transposed if backend == LIGER else transposed.mT)


def _run_of(name: str) -> ExpertFFN:
    if name == LIGER:
        return _liger
    return contender(name).forward


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
