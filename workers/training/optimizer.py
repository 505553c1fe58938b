"""The optimizer of a training run: torch's fused kernels, and the formats of weights, gradients and moments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bexp.explorer.cost.activation_memory import OPTIMIZER_BUCKET_BYTES
from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import MUON
from bexp.explorer.model.training import OptimizerSpec
from bexp.trainer.muon_optimizer import hidden_matrices
from bexp.workers.instruments.kernel_shapes import torch_dtype


@dataclass(frozen=True)
class OptimizerSettings:
    """Hyperparameters of AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) and of SGD; torch's defaults."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    momentum: float = 0.9


@dataclass(frozen=True)
class _Slice:
    """A range of a parameter's elements that is stepped at once; every tensor is one-dimensional."""

    owner: int
    """The index of the parameter."""
    start: int
    """The first element."""
    stop: int
    """The element after the last."""
    parameter: Tensor
    """The elements of the parameter."""
    weight: Tensor
    """The tensor that the kernel updates: the parameter itself, or its master copy."""
    moments: tuple[Tensor, ...]
    """The optimizer's state for these elements."""
    step: Tensor
    """The number of steps so far."""

    @property
    def size(self) -> int:
        return self.stop - self.start


class TrainingOptimizer:
    """Fused AdamW, or fused SGD with momentum.

    The arithmetic happens in the format of the master weights, or of the parameters where there are none. Gradients and
    moments in another format are converted with at most `bucket_bytes` of working memory at a time; large tensors are
    cut for that. None converts all of them at once.

    Gradients in another format than the parameters are kept in main gradients. These take each new gradient as soon as
    backward has accumulated it, and free it. Of sharded parameters, each device has and steps its own share.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        spec: OptimizerSpec,
        dtype: DType,
        *,
        hyperparameters: OptimizerSettings = OptimizerSettings(),
        bucket_bytes: int | None = OPTIMIZER_BUCKET_BYTES,
    ) -> None:
        self.parameters = list(parameters)
        self._hyperparameters = hyperparameters
        self.spec = spec
        self._dtype = torch.float32 if spec.has_master(dtype) else torch_dtype(dtype)
        self._moment_dtype = torch_dtype(spec.moment_dtype(dtype))
        self._gradient_dtype = torch_dtype(spec.gradient_dtype(dtype))
        self._has_master = spec.has_master(dtype)
        self._converted_gradients = self._gradient_dtype is not self._dtype
        self._converted_moments = self._moment_dtype is not self._dtype
        self._main_gradients: list[Tensor] | None = None
        if self._gradient_dtype is not torch_dtype(dtype):
            self._main_gradients = [torch.zeros_like(own(p), dtype=self._gradient_dtype) for p in self.parameters]
            for parameter, main in zip(self.parameters, self._main_gradients, strict=True):
                parameter.register_post_accumulate_grad_hook(_Accumulate(main))
        self._buckets = self._plan(bucket_bytes)

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients that `step` reads, one for each parameter; None before the first backward."""
        if self._main_gradients is not None:
            return list(self._main_gradients)
        return [None if parameter.grad is None else own(parameter.grad) for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        gradients = [None if gradient is None else gradient.view(-1) for gradient in self.gradients]
        for bucket in self._buckets:
            slices = [part for part in bucket if gradients[part.owner] is not None]
            if slices:
                self._step(slices, gradients)

    @torch.no_grad()
    def zero_grad(self) -> None:
        """Set the gradients to zero in place, so that their memory stays the same from step to step."""
        _set_to_zero(self.gradients)

    def _plan(self, bucket_bytes: int | None) -> list[list[_Slice]]:
        working_tensors = self._converted_gradients + self.spec.num_states * self._converted_moments
        longest = None
        if working_tensors and bucket_bytes is not None:
            longest = max(1, bucket_bytes // (self._dtype.itemsize * working_tensors))
        buckets: list[list[_Slice]] = []
        room = 0
        for owner, parameter in enumerate(self.parameters):
            flat = own(parameter.detach()).view(-1)
            weight = flat.to(self._dtype, copy=True) if self._has_master else flat
            moments = tuple(torch.zeros_like(flat, dtype=self._moment_dtype) for _ in range(self.spec.num_states))
            size = flat.numel()
            for start in range(0, size, longest or max(1, size)):
                stop = min(size, start + (longest or size))
                if not buckets or (longest is not None and stop - start > room):
                    buckets.append([])
                    room = longest or 0
                room -= stop - start
                buckets[-1].append(
                    _Slice(
                        owner,
                        start,
                        stop,
                        flat[start:stop],
                        weight[start:stop],
                        tuple(moment[start:stop] for moment in moments),
                        torch.zeros((), dtype=torch.float32, device=flat.device),
                    )
                )
        return buckets

    def _step(self, slices: list[_Slice], gradients: list[Tensor | None]) -> None:
        grads = [gradient[part.start : part.stop] for part in slices if (gradient := gradients[part.owner]) is not None]
        moments = [[part.moments[i] for part in slices] for i in range(self.spec.num_states)]
        if self._converted_gradients:
            grads = self._convert(grads)
        working = [self._convert(moment) for moment in moments] if self._converted_moments else moments
        self._update(slices, grads, working)
        if self._converted_moments:
            for moment, changed in zip(moments, working, strict=True):
                torch._foreach_copy_(moment, changed)
        if self._has_master:
            torch._foreach_copy_([part.parameter for part in slices], [part.weight for part in slices])

    def _convert(self, tensors: list[Tensor]) -> list[Tensor]:
        sizes = [tensor.numel() for tensor in tensors]
        buffer = torch.empty(sum(sizes), dtype=self._dtype, device=tensors[0].device)
        views = list(buffer.split(sizes))
        torch._foreach_copy_(views, tensors)
        return views

    def _update(self, slices: list[_Slice], grads: list[Tensor], moments: list[list[Tensor]]) -> None:
        weights = [part.weight for part in slices]
        h = self._hyperparameters
        if self.spec.name == "adamw":
            steps = [part.step for part in slices]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                weights,
                grads,
                moments[0],
                moments[1],
                [],
                steps,
                lr=h.learning_rate,
                beta1=h.beta1,
                beta2=h.beta2,
                weight_decay=h.weight_decay,
                eps=h.epsilon,
                amsgrad=False,
                maximize=False,
            )
            return
        torch._fused_sgd_(
            weights,
            grads,
            moments[0],
            weight_decay=0.0,
            momentum=h.momentum,
            lr=h.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class _Accumulate:
    """A hook that adds a parameter's new gradient to its main gradient, and frees the new one."""

    is_replayable = True
    """A graph that has captured the hook repeats all of its effects."""

    def __init__(self, main: Tensor) -> None:
        self.main = main

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.main.add_(own(parameter.grad))
            parameter.grad = None


def _set_to_zero(gradients: list[Tensor | None]) -> None:
    present = [gradient for gradient in gradients if gradient is not None]
    if present:
        torch._foreach_zero_(present)


def own(tensor: Tensor) -> Tensor:
    """Return this device's share of a tensor that may be sharded over several, without a copy."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, whose import takes long
    return local


class MuonOptimizer:
    """torch's Muon for matrices of hidden layers, and fused AdamW for the rest.

    Weights and moments have the formats of `TrainingOptimizer`. Each matrix is stepped alone, so that only one gradient
    is converted at a time.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], outer: Iterable[nn.Module], spec: OptimizerSpec, dtype: DType
    ) -> None:
        self.parameters = list(parameters)
        matrices, others = hidden_matrices(self.parameters, outer)
        self._others = TrainingOptimizer(others, spec.model_copy(update={"name": "adamw"}), dtype)
        self._muons: list[tuple[nn.Parameter, nn.Parameter, torch.optim.Optimizer]] = []
        for matrix in matrices:
            weight = nn.Parameter(matrix.detach().float()) if spec.has_master(dtype) else matrix
            muon = torch.optim.Muon([weight], lr=OptimizerSettings.learning_rate)
            muon.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            self._muons.append((matrix, weight, muon))

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients that `step` reads, one for each parameter; None before the first backward."""
        return [parameter.grad for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        self._others.step()
        for matrix, weight, muon in self._muons:
            if weight is matrix:
                muon.step()
            elif matrix.grad is not None:
                weight.grad = matrix.grad.float()
                muon.step()
                weight.grad = None
                matrix.copy_(weight)

    def zero_grad(self) -> None:
        """Set the gradients to zero in place, so that their memory stays the same from step to step."""
        _set_to_zero(self.gradients)


def build_optimizer(
    parameters: Iterable[nn.Parameter], spec: OptimizerSpec, dtype: DType, outer: Iterable[nn.Module] = ()
) -> TrainingOptimizer | MuonOptimizer:
    """Return the optimizer of `spec` for parameters in `dtype`, with its states and master weights allocated.

    `outer` are the embedding and the head, which Muon leaves to AdamW.
    """
    if spec.name == MUON:
        return MuonOptimizer(parameters, outer, spec, dtype)
    return TrainingOptimizer(parameters, spec, dtype)
