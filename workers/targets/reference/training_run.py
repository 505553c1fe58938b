"""A model in training, built and stepped as a trainer would."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.graphs.graphed_loss import GraphedLoss
from bexp.measure.timestamps import Mark, mark_of
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.kernel_shapes import torch_dtype
from bexp.workers.instruments.ring import find_ring
from bexp.workers.targets.reference.decoder import DecoderModel
from bexp.workers.targets.reference.factory import random_tokens
from bexp.workers.training.choice import data_parallel
from bexp.workers.training.data_parallel import DATA_PARALLEL_MICRO_STEPS, MICRO_STEPS
from bexp.workers.training.graphs import require_captured
from bexp.workers.training.optimizer import TrainingOptimizer, build_optimizer


class ReferenceTrainingRun:
    """A model with its optimizer and its micro-batches. Eval mode has no optimizer and no backward.

    The ranks of a group have the same parameters and train together, sharded or replicated as the request says. The
    ranks of a ring share the sequences of a micro-batch, and each ring has different sequences. If `together` is false,
    each rank trains a model alone and communicates nothing.
    """

    def __init__(
        self,
        instruments: Instruments,
        model: ModelSpec,
        candidate: Candidate,
        request: ExplorationRequest,
        *,
        together: bool = True,
    ) -> None:
        generator = instruments.generator(request.seed)
        self._instruments = instruments
        self._trains = request.mode == "train"
        self._mark = mark_of(instruments.device, alone=instruments.rank_group.size == 1)
        group, training = instruments.rank_group, request.training
        self.is_data_parallel = self._trains and group.size > 1 and together
        self._parallel = data_parallel(
            group.members if self.is_data_parallel else None,
            instruments.device,
            training.sharding,
            torch_dtype(model.dtype),
            torch_dtype(training.optimizer.gradient_dtype(model.dtype)),
        )
        size, layout = candidate.context_parallel_size, candidate.context_parallel_layout
        ring = find_ring(instruments, model, size, layout, candidate.attention_backend)
        decoder = DecoderModel(
            model,
            candidate,
            request,
            instruments.device,
            generator=generator,
            context_parallel=ring,
            take_unit=self._parallel.take,
        )
        self._model = self._parallel.wrap(decoder)
        self._graphed: GraphedLoss | None = None
        if self._trains and request.execution_of(candidate).replays:
            self._graphed = GraphedLoss(decoder, decoder.forward)
        self.optimizer: TrainingOptimizer | None = None
        if self._trains:
            self.optimizer = build_optimizer(decoder.parameters(), training.optimizer, model.dtype)
        shape = (candidate.micro_batch_size, model.seq_length)
        drawn = instruments.generator(request.seed + 1 + group.rank // size) if group.size > 1 else generator

        def tokens() -> Tensor:
            whole = random_tokens(model, shape, instruments.device, drawn)
            return whole if ring is None else ring.shard(whole)

        number = DATA_PARALLEL_MICRO_STEPS if self.is_data_parallel else MICRO_STEPS
        self._batches: list[tuple[Tensor, Tensor]] = [(tokens(), tokens()) for _ in range(number)]
        self.num_micro_steps = number

    @property
    def graph_bytes(self) -> int:
        """Bytes that CUDA graphs hold for their activations."""
        return 0 if self._graphed is None else self._graphed.held_bytes

    def begin(self) -> float:
        """Prepare, and run a step of one micro-step; returns an estimate of a whole step in seconds."""
        seconds: list[float] = []

        def timed_micro_step() -> None:
            self._instruments.synchronize()
            started = time.perf_counter()
            self.micro_step(len(self._batches) - 1)
            self._instruments.synchronize()
            seconds.append(time.perf_counter() - started)

        if self._graphed is not None:
            self.micro_step(0)
            require_captured(self._graphed)
            if self.optimizer is not None:
                self.optimizer.zero_grad()
        if self.optimizer is not None:
            self._parallel.prepare(self.optimizer, timed_micro_step)  # may run some, and leave gradients
        if not seconds:
            timed_micro_step()
        self.update()
        return seconds[-1] * len(self._batches)

    def step(self) -> list[Mark]:
        """Run a step; returns the moments before each micro-step, before the optimizer, and after it."""
        marks = [self._mark()]
        for i in range(len(self._batches)):
            self.micro_step(i)
            marks.append(self._mark())
        self.update()
        return [*marks, self._mark()]

    def finish(self) -> None:
        """Wait for the last step, and free what outlives the model."""
        self._instruments.synchronize()
        self._parallel.finish()

    def update(self) -> None:
        """Step the optimizer and set the gradients to zero."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def micro_step(self, number: int) -> None:
        """Run forward and backward of one micro-batch of a step."""
        tokens, targets = self._batches[number]
        with self._parallel.micro_step(is_last=number == len(self._batches) - 1):
            with torch.set_grad_enabled(self._trains):
                if self._graphed is not None:
                    loss = self._graphed(tokens_BS=tokens, targets_BS=targets)
                else:
                    loss = self._model(tokens, targets)
            if self._trains:
                (loss / len(self._batches)).backward()
            del loss
