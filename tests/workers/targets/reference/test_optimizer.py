from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bexp.explorer.model.model import DType
from bexp.explorer.model.training import OptimizerSpec
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.training.optimizer import MuonOptimizer, OptimizerSettings, TrainingOptimizer, build_optimizer
from tests.bexp.kernels.references import relative_error

H = OptimizerSettings()
SHAPES = ((7, 5), (300,), (4, 3, 2))


def make(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradient(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def accumulate(parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    """One backward whose gradients are the given ones, rounded to the parameters' format."""
    torch.stack([(p * g.to(p.dtype)).sum() for p, g in zip(parameters, gradients, strict=True)]).sum().backward()


def adamw(weights: list[Tensor], steps: list[list[Tensor]]) -> list[Tensor]:
    """AdamW in float64, as algorithm 2 of arXiv:1711.05101."""
    results = []
    for i, weight in enumerate(weights):
        w, m, v = weight.double(), torch.zeros_like(weight.double()), torch.zeros_like(weight.double())
        for t, gradients in enumerate(steps, 1):
            g = gradients[i].double()
            w = w - H.learning_rate * H.weight_decay * w
            m, v = H.beta1 * m + (1 - H.beta1) * g, H.beta2 * v + (1 - H.beta2) * g * g
            w = w - H.learning_rate * (m / (1 - H.beta1**t)) / ((v / (1 - H.beta2**t)).sqrt() + H.epsilon)
        results.append(w)
    return results


def sgd(weights: list[Tensor], steps: list[list[Tensor]]) -> list[Tensor]:
    """SGD with momentum in float64."""
    results = []
    for i, weight in enumerate(weights):
        w, momentum = weight.double(), torch.zeros_like(weight.double())
        for gradients in steps:
            momentum = H.momentum * momentum + gradients[i].double()
            w = w - H.learning_rate * momentum
        results.append(w)
    return results


REFERENCES: dict[str, Callable[[list[Tensor], list[list[Tensor]]], list[Tensor]]] = {"adamw": adamw, "sgd": sgd}


def change_errors(parameters: list[nn.Parameter], start: list[Tensor], expected: list[Tensor]) -> list[float]:
    pairs = zip(parameters, start, expected, strict=True)
    return [relative_error(p.double() - s.double(), e - s.double()) for p, s, e in pairs]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_float32_steps(name: str) -> None:
    parameters = make(torch.float32)
    start = [p.detach().clone() for p in parameters]
    optimizer = build_optimizer(parameters, OptimizerSpec.model_validate({"name": name}), DType.FLOAT32)
    for step in range(4):
        optimizer.zero_grad()
        accumulate(parameters, gradient(step))
        optimizer.step()
    expected = REFERENCES[name](start, [gradient(step) for step in range(4)])
    assert max(change_errors(parameters, start, expected)) <= 1e-3  # of the change, which is small beside the weight


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 400])
def test_master_weights_take_steps_that_bfloat16_would_lose(name: str, bucket_bytes: int) -> None:
    """The parameters are the rounded master weights, which follow the float64 reference; buckets cut tensors."""
    parameters = make(torch.bfloat16)
    start = [p.detach().clone() for p in parameters]
    spec = OptimizerSpec.model_validate({"name": name})
    optimizer = TrainingOptimizer(parameters, spec, DType.BFLOAT16, bucket_bytes=bucket_bytes)
    for step in range(6):
        optimizer.zero_grad()
        accumulate(parameters, gradient(step))
        optimizer.step()
    rounded = [[g.to(torch.bfloat16) for g in gradient(step)] for step in range(6)]
    for parameter, wanted in zip(parameters, REFERENCES[name](start, rounded), strict=True):
        same = parameter.detach() == wanted.to(torch.bfloat16)
        assert same.double().mean() >= 0.97  # a weight midway between two bfloat16 numbers may round either way
        assert relative_error(parameter, wanted) <= 2**-8


MUON = OptimizerSpec(name="muon")


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_muon_steps_matrices_and_adamw_the_rest_on_master_weights(dtype: DType) -> None:
    """The step is that of torch's own optimizers on the master weights, whose rounded values the parameters are."""
    kept = torch.float32 if dtype is DType.FLOAT32 else torch.bfloat16
    parameters, (first, *rest) = make(kept), make(kept)
    embedding = nn.Parameter(torch.ones(6, 2, dtype=kept))
    parameters.append(embedding)
    masters = [nn.Parameter(p.detach().float()) for p in (first, *rest, embedding)]
    settings: dict[str, Any] = {"lr": H.learning_rate}
    matrix = torch.optim.Muon([masters[0]], **settings)
    others = torch.optim.AdamW(masters[1:], **settings, weight_decay=H.weight_decay)
    optimizer = build_optimizer(parameters, MUON, dtype, [nn.ParameterList([embedding])])
    assert isinstance(optimizer, MuonOptimizer)
    for step in range(4):
        optimizer.zero_grad()
        given = [*gradient(step), torch.full((6, 2), 0.1 * step)]
        accumulate(parameters, given)
        for master, one in zip(masters, given, strict=True):
            master.grad = one.to(kept).float()
        for each in (optimizer, matrix, others):
            each.step()
    for parameter, master in zip(parameters, masters, strict=True):
        wanted = master.detach().to(kept)
        same = (parameter.detach() == wanted).double().mean() if kept is torch.bfloat16 else 0.0
        assert same >= 0.97 or relative_error(parameter, wanted) <= 1e-5
    before = [p.grad.data_ptr() for p in parameters if p.grad is not None]
    optimizer.zero_grad()
    assert [p.grad.data_ptr() for p in parameters if p.grad is not None] == before
    assert all(gradient is not None and not gradient.any() for gradient in optimizer.gradients)


def test_muon_without_gradients_moves_nothing_and_an_older_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = make(torch.bfloat16)
    start = [p.detach().clone() for p in parameters]
    optimizer = build_optimizer(parameters, MUON, DType.BFLOAT16)
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(p, before) for p, before in zip(parameters, start, strict=True))
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UnsupportedTrialError, match=r"optimizer 'muon' needs torch 2\.9, and this is 2"):
        build_optimizer(parameters, MUON, DType.BFLOAT16)


def test_buckets_bound_what_a_step_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = make(torch.bfloat16)
    optimizer = TrainingOptimizer(parameters, OptimizerSpec(), DType.BFLOAT16, bucket_bytes=400)
    accumulate(parameters, gradient(0))
    sizes: list[int] = []
    convert = TrainingOptimizer._convert

    def spy(self: TrainingOptimizer, tensors: list[Tensor]) -> list[Tensor]:
        sizes.append(sum(tensor.numel() for tensor in tensors) * 4)
        return convert(self, tensors)

    monkeypatch.setattr(TrainingOptimizer, "_convert", spy)
    optimizer.step()
    assert max(sizes) <= 400
    assert sum(sizes) == sum(p.numel() for p in parameters) * 4


@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        (DType.BFLOAT16, {"state_dtype": "bfloat16"}),
        (DType.BFLOAT16, {"master_dtype": None, "state_dtype": "float32"}),
        (DType.BFLOAT16, {"master_dtype": None}),
        (DType.FLOAT32, {"grad_dtype": "bfloat16", "state_dtype": "bfloat16"}),
        (DType.BFLOAT16, {"grad_dtype": "float32", "name": "sgd", "state_dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_every_combination_of_formats_steps_towards_the_reference(dtype: DType, fields: dict[str, Any]) -> None:
    """Momentum of a bfloat16 optimizer errs by its rounding; the direction and size of the change stay."""
    spec = OptimizerSpec.model_validate(fields)
    parameters = make(torch.float32 if dtype is DType.FLOAT32 else torch.bfloat16)
    with torch.no_grad():
        for p in parameters:
            p.mul_(2**-6)  # small weights, so that bfloat16 resolves a step
    start = [p.detach().clone() for p in parameters]
    optimizer = TrainingOptimizer(parameters, spec, dtype, bucket_bytes=1000)
    for step in range(3):
        optimizer.zero_grad()
        accumulate(parameters, gradient(step))
        optimizer.step()
    expected = REFERENCES[spec.name](start, [gradient(step) for step in range(3)])
    assert max(change_errors(parameters, start, expected)) <= 0.1


def test_float32_gradients_of_bfloat16_parameters_add_up_without_rounding() -> None:
    parameters = make(torch.bfloat16)
    optimizer = build_optimizer(parameters, OptimizerSpec(grad_dtype=DType.FLOAT32), DType.BFLOAT16)
    for step in range(8):
        accumulate(parameters, gradient(step))
        assert all(p.grad is None for p in parameters)
    for i, actual in enumerate(optimizer.gradients):
        exact = torch.stack([gradient(step)[i].to(torch.bfloat16).double() for step in range(8)]).sum(0)
        assert actual is not None
        assert actual.dtype is torch.float32
        assert relative_error(actual, exact) <= 1e-6
    optimizer.zero_grad()
    assert all(g is not None and not g.any() for g in optimizer.gradients)


def test_gradients_stay_where_they_are() -> None:
    parameters = make(torch.bfloat16)
    optimizer = build_optimizer(parameters, OptimizerSpec(), DType.BFLOAT16)
    optimizer.step()  # without gradients nothing moves
    accumulate(parameters, gradient(0))
    before = [p.grad.data_ptr() for p in parameters if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    assert [p.grad.data_ptr() for p in parameters if p.grad is not None] == before
    assert all(p.grad is not None and not p.grad.any() for p in parameters)


@pytest.mark.parametrize(("name", "kernel"), [("adamw", "_fused_adamw_"), ("sgd", "_fused_sgd_")])
def test_the_fused_kernel_is_used(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = make(torch.float32)
    optimizer = build_optimizer(parameters, OptimizerSpec.model_validate({"name": name}), DType.FLOAT32)
    accumulate(parameters, gradient(0))
    calls: list[int] = []
    fused = getattr(torch, kernel)

    def spy(weights: list[Tensor], *args: Any, **kwargs: Any) -> None:
        calls.append(len(weights))
        fused(weights, *args, **kwargs)

    monkeypatch.setattr(torch, kernel, spy)
    optimizer.step()
    assert calls == [len(SHAPES)]
