"""Two ranks that train a tiny model at each level of sharding, and write how far they are from one with all data."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.cost.text_batches import TextBatch
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.profiler.distributed.process_groups import ProcessGroups
from bexp.workers.profiler.trials import data_parallel_communication
from bexp.workers.profiler.trials.whole_model import run_steps
from bexp.workers.targets.transformers.passes import settings_of
from bexp.workers.targets.transformers.self_check import SelfCheck
from bexp.workers.targets.transformers.target import TransformersTarget, describe_parts
from bexp.workers.targets.transformers.training_run import TransformersTrainingRun
from bexp.workers.training.optimizer import own
from tests.forked_ranks import SHARDING, fork_ranks
from tests.waits import PATIENCE_SECONDS
from tests.workers.targets.transformers.targets import CPU, request_for

NUM_RANKS = 2
LEVELS = tuple(Sharding)
TRAINING: dict[str, dict[str, Any]] = {
    "full": {},
    "master": {"precision": "master"},
    "lora": {"lora": {"r": 4, "target_modules": ["q_proj", "o_proj"]}},
}
"""What is trained; adapters are frozen weights in one format and trained ones in another."""


def candidate_at(level: Sharding) -> Candidate:
    """With the loss in chunks and recomputed layers, which run what the hooks of sharding are around."""
    return Candidate(
        micro_batch_size=1,
        attention_backend="sdpa",
        num_query_groups=1,
        sharding=level,
        recompute=Recompute.FULL,
        loss="chunked",
    )


class Rank:
    """One rank, with the target of a job that chooses among all levels."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.groups = ProcessGroups(FileStore(str(folder / "store"), NUM_RANKS), rank, NUM_RANKS, CPU)
        self.instruments = Instruments(CPU, NUM_RANKS)

    def open(self, training: dict[str, Any]) -> None:
        self.request = request_for(num_devices=NUM_RANKS, sharding_levels=LEVELS, training=training)
        self.target = TransformersTarget(self.request, self.instruments)
        self.target._resolved.__dict__["check"] = SelfCheck()  # other tests run it
        self.parts = describe_parts(self.target._resolved, tiles=None, checkpointing=None, named={})
        decompose = Decomposer(self.parts, training=True, communicates=True)
        self.communications = [decompose(candidate_at(level)).communication for level in LEVELS]
        task = TrialTask(
            number=0,
            kind=TrialKind.WHOLE_MODEL,
            model=self.parts,
            candidate=candidate_at(Sharding.NONE),
            timeout_seconds=PATIENCE_SECONDS,
            num_processes=NUM_RANKS,
        )
        self.groups.prepare(task)
        self.instruments.join(self.groups.rank_group(task))

    def communication(self, level: Sharding) -> ComponentMeasurement:
        component = self.communications[LEVELS.index(level)]
        assert component is not None
        request = self.request.sharded(level)
        return data_parallel_communication.measure_data_parallel_communication(
            self.instruments, self.target, self.parts, component, request, PhaseClock()
        )

    def changed_share(self, level: Sharding) -> float:
        """The share of trained parameters that a step changes in the job's own format, which rounds some away."""
        with self.target.training_run(candidate_at(level), self.parts, self.request.sharded(level)) as run:
            trained = [p for p in run._model.parameters() if p.requires_grad]
            before = [own(p.detach()).clone() for p in trained]
            run.begin()
            run.step()
            run.finish()
            changed = [not torch.equal(own(p.detach()), old) for p, old in zip(trained, before, strict=True)]
        return sum(changed) / len(changed)

    def peak_bytes(self, level: Sharding, num_devices: int = NUM_RANKS, *, together: bool = True) -> int:
        """Of steps of the tiny model, by these ranks or by one process."""
        alone = Instruments(CPU, 1)
        target = self.target if together else TransformersTarget(self.request, alone)
        request = self.request.sharded(level).model_copy(update={"num_devices": num_devices})
        settings, texts = settings_of(candidate_at(level), request), [TextBatch.whole(1, request.seq_length)]

        with ExitStack() as stack:

            def build() -> TransformersTrainingRun:
                made = target._train(target._resolved.config, settings, texts, request, together=True)
                return stack.enter_context(made)

            return run_steps(self.instruments if together else alone, build, PhaseClock()).peak_bytes

    def gradient_error(self, level: Sharding) -> float:
        """Of one step's gradients, relative to those of one process, in float32."""
        target = self.target
        target._build = replace(target._build, dtype=torch.float32)
        request = self.request.sharded(level)
        settings = settings_of(candidate_at(level), request)
        config = target._resolved.tiny
        texts = [TextBatch.whole(2, config.seq_length)]
        with target._train(config, settings, texts, request, together=True) as together:
            for number in range(together.num_micro_steps):
                together.micro_step(number)
        model: Any = together._model
        model = getattr(model, "module", model)
        batches: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(batches, together._batches[0])
        with target._train(config, settings, texts, request, together=False) as run:
            alone: Any = run._model
            alone.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
            for batch in batches:
                with target._build.autocast(CPU):
                    loss = alone(**batch).loss
                (loss / NUM_RANKS).backward()
        target._build = replace(target._build, dtype=torch.bfloat16)
        pairs = [
            (whole(ours.grad), theirs.grad)
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True)
            if theirs.requires_grad
        ]
        return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs)


def whole(tensor: Any) -> Tensor:
    """All of a tensor that may be sharded."""
    full = getattr(tensor, "full_tensor", None)
    found: Tensor = tensor if full is None else full()
    return found.detach()


def run(folder: Path, kinds: list[str], rank: int) -> None:
    torch.set_num_threads(1)
    data_parallel_communication.SECONDS = 0.1  # of products beside the exchange
    one = Rank(folder, rank)
    found: dict[str, Any] = {}
    for kind in kinds:
        one.open(TRAINING[kind])
        errors = {level: one.gradient_error(level) for level in LEVELS}
        found[kind] = {"errors": errors, "changed": one.changed_share(Sharding.ZERO3)}
    one.open(TRAINING["full"])
    found["peaks"] = {level: one.peak_bytes(level) for level in (Sharding.NONE, Sharding.ZERO1)}
    found["peaks"] |= {f"alone of {n}": one.peak_bytes(Sharding.NONE, n, together=False) for n in (1, NUM_RANKS)}
    found["trained_bytes"] = one.parts.trainable_bytes
    found["communication"] = one.communication(Sharding.ZERO3).model_dump(mode="json")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    shared = (*SHARDING, "transformers", "accelerate")
    sys.exit(fork_ranks(partial(run, Path(sys.argv[1]), sys.argv[2:]), NUM_RANKS, shared=shared))
