"""A whole transformers model that trains as its library's Trainer does, with the optimizers of other libraries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import LIBRARY, MUON, TORCHAO, OptimizerName
from bexp.explorer.model.training import OptimizerSpec
from bexp.measure.timestamps import Mark, mark_of, synchronize
from bexp.trainer.muon_optimizer import MuonWithAdamW, outer_modules
from bexp.transformers.graph import graphed
from bexp.transformers.recompute import pinned_bytes
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.targets.transformers.model import BuildSettings
from bexp.workers.training.data_parallel import DataParallel, SingleProcess, require_captured
from bexp.workers.training.optimizer import OptimizerSettings, TrainingOptimizer

BETAS = (0.9, 0.999)
"""TrainingArguments' defaults."""
BLOCK_SIZE = 256
"""Elements that share a scale in torchao's states; the Trainer's default."""


def make_optimizer(
    name: str, parameters: list[nn.Parameter], learning_rate: float, outer: Sequence[nn.Module] = ()
) -> torch.optim.Optimizer:
    """Return an optimizer of LIBRARY, which may treat weights of the embeddings and the output layer otherwise.

    As in the Trainer, eight-bit ones keep 32 bits for weights of embeddings. `outer` are those modules.

    Raises:
        UnsupportedTrialError: its package is missing, or does not work here.
    """
    package = LIBRARY[name].package
    if name == MUON:
        return MuonWithAdamW(parameters, outer, lr=learning_rate)
    if package is None:
        return _of_torch(name, parameters, learning_rate)
    try:
        module: Any = import_module(f"{package}.optim")
    except Exception as error:  # a library that is broken in any way
        raise UnsupportedTrialError(
            f"optimizer '{name}' needs {package}: pip install 'bexp[{package}]' ({error})"
        ) from error
    made: torch.optim.Optimizer
    if package == TORCHAO:
        if LIBRARY[name].is_on_host:
            kind = partial(module.CPUOffloadOptimizer, optimizer_class=torch.optim.AdamW)
        else:
            kind = module.AdamW4bit if name.endswith("4bit") else module.AdamW8bit
            kind = partial(kind, block_size=BLOCK_SIZE)
        made = kind(parameters, lr=learning_rate, betas=BETAS, weight_decay=0.0)
        return made
    bits = 8 if name.endswith("8bit") else 32
    # Its manager knows parameters by their places alone, and would take those of one optimizer for another's.
    module.GlobalOptimManager._instance = None
    if name.startswith("ademamix"):
        made = module.AdEMAMix(parameters, lr=learning_rate, weight_decay=0.0, optim_bits=bits)
    else:
        kind = module.Lion if name.startswith("lion") else module.AdamW
        made = kind(parameters, lr=learning_rate, betas=BETAS, weight_decay=0.0, optim_bits=bits)
    if bits == 8:  # by their places, because the manager would hold on to a registered module
        kept = {id(each.weight) for each in outer if isinstance(each, nn.Embedding)}
        places = (place for place, parameter in enumerate(parameters) if id(parameter) in kept)
        module.GlobalOptimManager.get_instance().index2config.update({(0, i): {"optim_bits": 32} for i in places})
    return made


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's state on the device; a tensor that several parameters share counts once.

    torchao's optimizer on the host steps small parameters on the device.
    """
    if hasattr(optimizer, "d_opt"):
        return 0 if optimizer.d_opt is None else state_bytes(optimizer.d_opt)
    sizes: dict[int, int] = {}
    for state in optimizer.state.values():
        for value in state.values():
            for tensor in _plain(value) if isinstance(value, Tensor) else ():
                sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def host_bytes(optimizer: Any) -> int:
    """Return the bytes of torchao's optimizer in the host's memory: states, and pinned weights and gradients."""
    pinned = [tensor for weight in optimizer.param_d2h_map.values() for tensor in (weight, weight.grad)]
    return sum(map(pinned_bytes, pinned)) + sum(map(state_bytes, optimizer.optim_dict.values()))


def _of_torch(name: str, parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    if name == "adafactor":
        from transformers.optimization import Adafactor  # noqa: PLC0415 - the library's own

        made: torch.optim.Optimizer = Adafactor(
            parameters, lr=learning_rate, scale_parameter=False, relative_step=False
        )
        return made
    kind = torch.optim.Adagrad if name == "adagrad" else torch.optim.RMSprop
    return kind(parameters, lr=learning_rate)


def _plain(tensor: Tensor) -> list[Tensor]:
    """The tensors of which a tensor consists: codes and scales of a quantized one, or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(tensor, name))]


MAX_GRADIENT_NORM = 1.0
"""TrainingArguments.max_grad_norm's default."""
LEARNING_RATE = 5e-5
"""TrainingArguments.learning_rate's default. At AdamW's own, 1e-3, a router of experts soon loses its balance on random
texts, while layers that are measured alone keep theirs."""


class TrainerOptimizer:
    """The Trainer's optimizer: gradients are clipped by their norm, then fused AdamW, SGD or one of LIBRARY steps.

    States of AdamW and SGD have the format of the parameters, and there are no master weights.

    With `master_weights`, the step is that of DeepSpeed's `bf16`. All gradients are converted to float32, and freed
    after the step. The step changes float32 master weights and moments, and copies them to bfloat16 parameters.

    Gradients are dropped after each step, unless `keeps_gradients`: then they wait to be filled anew. An optimizer in
    the host's memory takes gradients there as backward makes them, so they are not clipped. Kept ones go there within
    the step.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        name: OptimizerName,
        *,
        master_weights: bool = False,
        keeps_gradients: bool = False,
        outer: Sequence[nn.Module] = (),
    ) -> None:
        self.parameters = parameters
        self._keeps_gradients = keeps_gradients
        self._is_on_host = name in LIBRARY and LIBRARY[name].is_on_host
        fused = all(p.is_cuda or p.device.type == "cpu" for p in parameters)
        self._optimizer: TrainingOptimizer | torch.optim.Optimizer
        if master_weights:
            settings, spec = OptimizerSettings(learning_rate=LEARNING_RATE), OptimizerSpec(name=name)
            self._optimizer = TrainingOptimizer(
                parameters, spec, DType.BFLOAT16, hyperparameters=settings, bucket_bytes=None
            )
        elif name in LIBRARY:
            self._optimizer = make_optimizer(name, parameters, LEARNING_RATE, outer)
        elif name == "adamw":
            self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused)
        else:
            self._optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9, fused=fused)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of an optimizer of LIBRARY on the device, after a step."""
        assert isinstance(self._optimizer, torch.optim.Optimizer), "it has no master weights"
        return state_bytes(self._optimizer)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that the optimizer keeps, after a step."""
        return host_bytes(self._optimizer) if self._is_on_host else 0

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients, in the parameters' order."""
        return [parameter.grad for parameter in self.parameters]

    def step(self) -> None:
        """Clip, and update the parameters."""
        if not self._is_on_host:
            nn.utils.clip_grad_norm_(self.parameters, MAX_GRADIENT_NORM)
        elif self._keeps_gradients:
            torch.autograd.backward(self.parameters, self.gradients)  # runs the hooks that move gradients to the host
        self._optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients, unless they are kept."""
        if not self._keeps_gradients:
            for parameter in self.parameters:
                parameter.grad = None


class TransformersTrainingRun:
    """Micro-steps of one model, with accumulated gradients, then the optimizer. Eval mode has forwards alone.

    `parallel` says how the ranks train together. It has taken the units inside `model` before. With `awaits_losses`,
    the loss of each micro-step is looked at, as some trainers do.
    """

    def __init__(
        self,
        model: Any,
        batches: list[dict[str, Tensor]],
        optimizer_name: OptimizerName,
        build: BuildSettings,
        device: torch.device,
        parallel: DataParallel,
        *,
        awaits_losses: bool = False,
    ) -> None:
        self._awaits_losses = awaits_losses
        self.is_data_parallel = not isinstance(parallel, SingleProcess)
        self.num_micro_steps = len(batches)
        self._batches = batches
        self._build = build
        self._device = device
        self._parallel = parallel
        self._mark = mark_of(device, alone=not self.is_data_parallel)
        model.train(build.training)
        self._graphed = graphed(model)
        self._model = parallel.wrap(model)
        self._optimizer: TrainerOptimizer | None = None
        if build.training:
            trained = [p for p in model.parameters() if p.requires_grad]
            self._optimizer = TrainerOptimizer(
                trained, optimizer_name, master_weights=build.keeps_master_weights, outer=outer_modules(model)
            )

    @property
    def graph_bytes(self) -> int:
        """Bytes that CUDA graphs hold for their activations."""
        return 0 if self._graphed is None else self._graphed.loss.held_bytes

    def begin(self) -> float:
        """Prepare, and run a step of one micro-step; return an estimate of a whole step in seconds."""
        seconds: list[float] = []

        def timed_micro_step() -> None:
            synchronize(self._device)
            started = time.perf_counter()
            self.micro_step(self.num_micro_steps - 1)
            synchronize(self._device)
            seconds.append(time.perf_counter() - started)

        if self._graphed is not None:
            self.micro_step(0)
            require_captured(self._graphed.loss)
            if self._optimizer is not None:
                self._optimizer.zero_grad()
        if self._optimizer is not None:
            self._parallel.prepare(self._optimizer, timed_micro_step)  # may run micro-steps, and leave gradients
        if not seconds:
            timed_micro_step()
        self.update()
        return seconds[-1] * self.num_micro_steps

    def step(self) -> list[Mark]:
        """Run one step; return the moments before each micro-step, before the optimizer, and after it."""
        marks = [self._mark()]
        for number in range(self.num_micro_steps):
            self.micro_step(number)
            marks.append(self._mark())
        self.update()
        return [*marks, self._mark()]

    def finish(self) -> None:
        """Wait for the device, and free memory that outlives the model."""
        synchronize(self._device)
        self._parallel.finish()

    def micro_step(self, number: int) -> None:
        """Run forward and, in training, backward of one micro-batch of a step."""
        training = self._optimizer is not None
        with self._parallel.micro_step(is_last=number == self.num_micro_steps - 1):
            with torch.set_grad_enabled(training), self._build.autocast(self._device):
                loss = self._model(**self._batches[number]).loss
            if training:
                (loss / self.num_micro_steps).backward()
        if training and self._awaits_losses:
            bool(loss.isnan())

    def update(self) -> None:
        """Step the optimizer and drop the gradients."""
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
