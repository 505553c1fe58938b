"""A model in training: built, begun, and stepped as a trainer would."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from bexp.measure.timestamps import Mark, mark_of
from explorer.spec.candidate import Candidate
from explorer.spec.model import ModelSpec
from explorer.spec.request import ExplorationRequest
from workers.profiler.instruments import Instruments
from workers.profiler.training.choice import data_parallel
from workers.profiler.trials.ring import find_ring
from workers.targets.reference.decoder import DecoderModel
from workers.targets.reference.factory import random_tokens
from workers.targets.reference.optimizer import TrainingOptimizer, build_optimizer
from workers.targets.reference.shapes import torch_dtype

MICRO_STEPS = 2
EXCHANGING_MICRO_STEPS = 3
"""The first, the last, and one between them, whose traffic is that of any other."""


class TrainingRun:
    """A model with its optimizer and its micro-batches. Eval mode has no optimizer and no backward.

    The processes of a ranks have the same parameters and train together, sharded as the request says or replicated.
    Those of a ring share the sequences of a micro-batch, each ring has sequences of its own. Unless they train
    `together`, each has a model to itself, and exchanges nothing.
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
        self._mark = mark_of(instruments.device)
        ranks, training = instruments.ranks, request.training
        self.exchanges = self._trains and ranks.size > 1 and together
        self._parallel = data_parallel(
            ranks.members if self.exchanges else None,
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
        self.optimizer: TrainingOptimizer | None = None
        if self._trains:
            self.optimizer = build_optimizer(decoder.parameters(), training.optimizer, model.dtype)
        shape = (candidate.micro_batch_size, model.seq_length)
        drawn = instruments.generator(request.seed + 1 + ranks.rank // size) if ranks.size > 1 else generator

        def tokens() -> Tensor:
            whole = random_tokens(model, shape, instruments.device, drawn)
            return whole if ring is None else ring.shard(whole)

        number = EXCHANGING_MICRO_STEPS if self.exchanges else MICRO_STEPS
        self._batches: list[tuple[Tensor, Tensor]] = [(tokens(), tokens()) for _ in range(number)]

    @property
    def num_micro_steps(self) -> int:
        """Of a step."""
        return len(self._batches)

    def begin(self) -> float:
        """What a job does before its first step, and a step of one micro-step; returns seconds of a whole one."""
        seconds: list[float] = []

        def timed_micro_step() -> None:
            self._instruments.synchronize()
            started = time.perf_counter()
            self.micro_step(len(self._batches) - 1)
            self._instruments.synchronize()
            seconds.append(time.perf_counter() - started)

        if self.optimizer is not None:
            self._parallel.prepare(self.optimizer, timed_micro_step)  # may run some, and leave gradients
        if not seconds:
            timed_micro_step()
        self.update()
        return seconds[-1] * len(self._batches)

    def step(self) -> list[Mark]:
        """One step; returns the moments before each micro-step, before the optimizer, and after it."""
        marks = [self._mark()]
        for i in range(len(self._batches)):
            self.micro_step(i)
            marks.append(self._mark())
        self.update()
        return [*marks, self._mark()]

    def finish(self) -> None:
        """After the last step."""
        self._instruments.synchronize()
        self._parallel.finish()

    def update(self) -> None:
        """Step the optimizer, and set the gradients to zero."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def micro_step(self, number: int) -> None:
        """Forward and backward of one micro-batch of a step."""
        tokens, targets = self._batches[number]
        with self._parallel.micro_step(is_last=number == len(self._batches) - 1):
            with torch.set_grad_enabled(self._trains):
                loss = self._model(tokens, targets)
            if self._trains:
                (loss / len(self._batches)).backward()
            del loss
