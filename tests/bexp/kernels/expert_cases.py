"""Expert FFN problems, and how close a back end comes to the reference; run on CPU and on CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bexp.kernels.activations import Activation
from bexp.kernels.experts.expert_backend import ExpertBackend
from tests.bexp.kernels import references

HOST = torch.device("cpu")


@dataclass(frozen=True)
class ExpertCase:
    name: str
    num_tokens: int
    num_experts: int
    top_k: int
    hidden: int = 16
    width: int = 24
    activation: Activation = "silu"
    gated: bool = True
    skew: float = 0.0
    one_takes_all: bool = False


CASES = (
    ExpertCase("uniform", 40, 8, 2),
    ExpertCase("skewed with empty experts", 24, 32, 3, skew=2.0),
    ExpertCase("one expert takes all", 20, 6, 1, one_takes_all=True),
    ExpertCase("every expert for every token", 12, 4, 4),
    ExpertCase("a single expert", 10, 1, 1),
    ExpertCase("more experts than pairs", 5, 512, 2),
    ExpertCase("one token", 1, 8, 2),
    ExpertCase("plain gelu", 30, 4, 2, activation="gelu", gated=False),
    ExpertCase("plain relu", 30, 4, 1, activation="relu", gated=False),
    ExpertCase("gated gelu", 30, 4, 2, activation="gelu"),
    ExpertCase("gated relu", 30, 4, 2, activation="relu"),
)


def problem(case: ExpertCase, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Routes (T, K), and the tensors x, weights, w_in, w_out, gradient, all rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    e, d, h = case.num_experts, case.hidden, case.width
    weights = torch.softmax(torch.randn(case.num_tokens, case.top_k, generator=generator), -1).to(dtype).to(device)
    log_share = -case.skew * torch.log(torch.arange(1, e + 1, dtype=torch.float32))
    gumbel = -torch.log(-torch.log(torch.rand(case.num_tokens, e, generator=generator).clamp(1e-6, 1 - 1e-6)))
    routes = (log_share + gumbel).topk(case.top_k, dim=-1).indices
    if case.one_takes_all:
        routes = torch.full_like(routes, e - 2)
    tensors = [
        normal(case.num_tokens, d),
        weights,
        normal(e, d, 2 * h if case.gated else h) / d**0.5,
        normal(e, h, d) / h**0.5,
        normal(case.num_tokens, d),
    ]
    return routes.to(device), tensors


def transposed_storage(w: Tensor, transposed: bool = True) -> Tensor:
    """The same numbers (E, K, N), stored as (E, N, K) if `transposed`."""
    return w.mT.contiguous().mT if transposed else w


def run(backend: ExpertBackend, case: ExpertCase, routes: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Output and the gradients of x, weights, w_in and w_out."""
    x, weights, w_in, w_out = inputs = references.leaves(tensors[:4], tensors[0].dtype)
    out = backend.forward(x, routes, weights, w_in, w_out, case.activation)
    out.backward(tensors[4])
    return [out.detach(), *(_gradient(tensor) for tensor in inputs)]


def expected(case: ExpertCase, routes: Tensor, tensors: list[Tensor], device: torch.device = HOST) -> list[Tensor]:
    """The same by the float64 reference, on `device`."""
    x, weights, w_in, w_out = inputs = references.leaves([tensor.to(device) for tensor in tensors[:4]])
    out = references.experts(x, routes.to(device), weights, w_in, w_out, case.activation)
    out.backward(tensors[4].to(device).double())
    return [out.detach(), *(_gradient(tensor) for tensor in inputs)]


def errors(backend: ExpertBackend, case: ExpertCase, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Relative error of the output and of each gradient."""
    routes, tensors = problem(case, dtype, device)
    names = ("out", "x", "weights", "w_in", "w_out")
    pairs = zip(names, run(backend, case, routes, tensors), expected(case, routes, tensors), strict=True)
    return {name: references.relative_error(actual, wanted) for name, actual, wanted in pairs}


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
