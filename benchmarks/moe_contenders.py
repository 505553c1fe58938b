"""The contenders of the MoE layer benchmark: layers on every back end, dense ones, and how results are checked.

The throughput of MoE layers is compared with dense ones of the same active FLOPs, by the device's time and by
wall-clock.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contenders.registry import COMPARED, contender, usable_contenders
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
CLOCKS = {"relative_to_dense": "seconds", "device_relative_to_dense": "device_seconds"}
"""By wall-clock (the larger of host and device) and by the device alone: the name of the ratio, and its time."""
GRAPH = " graph"
"""What the name of a contender ends in that is replayed as a CUDA graph."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


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


def compare_with_dense(rows: list[dict[str, Any]]) -> None:
    """Write both ratios into each row that was timed, against the faster dense layer for as many tokens.

    CUDA graphs are compared with dense layers that are graphs, too.
    """
    for ratio, seconds in CLOCKS.items():
        best: dict[tuple[Any, ...], float] = {}
        for row in rows:
            if row["backend"].removesuffix(GRAPH) in DENSE and seconds in row:
                best[_tokens(row)] = min(best.get(_tokens(row), math.inf), row[seconds])
        for row in rows:
            row.pop(ratio, None)
            if seconds in row and _tokens(row) in best:
                row[ratio] = best[_tokens(row)] / row[seconds]


def _tokens(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["top_k"], row["micro_batch_size"], row["backend"].endswith(GRAPH)


def expert_ffn(
    x_TD: Tensor, routes_TK: Tensor, weights_TK: Tensor, w_in: Tensor, w_out: Tensor, activation: Activation
) -> Tensor:
    """Do what `ExpertFFN` does. In float64 this is the reference for the back ends."""
    hidden_size = w_out.shape[1]
    out = torch.zeros_like(x_TD)
    for expert in range(w_in.shape[0]):
        tokens, ranks = torch.where(routes_TK == expert)
        h = x_TD[tokens] @ w_in[expert]
        act = _ACTIVATIONS[activation](h[:, :hidden_size])
        if h.shape[1] > hidden_size:
            act = act * h[:, hidden_size:]
        y = act @ w_out[expert]
        out = out.index_add(0, tokens, weights_TK[tokens, ranks].unsqueeze(1) * y)
    return out


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected value; infinity for NaN."""
    difference = (actual.detach().double() - wanted.detach().double()).norm()
    error = float(difference / wanted.detach().double().norm().clamp(min=1e-30))
    return math.inf if math.isnan(error) else error
