"""Is the answer for a trainer what its export says, and the best that this trainer can be told?

    python -m benchmarks.trainer_answers --seed-range FIRST END --out F

Each unseen device is explored for each trainer, with the micro-batch sizes that divide the batch. The log, the
recommendation, Python and the export must have one micro-batch and one recomputation. The regret is that of the
exported candidate against the best of the space of that trainer.

Each recorded table is explored for nobody in particular, and exported for each trainer. The regret is that against the
best recorded candidate that divides the batch, fits with full logits where the trainer has no loss in chunks, and can
be told.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe_commit, describe_environment, write_results
from benchmarks.recorded_candidates import compose
from benchmarks.replay.ground_truth import GroundTruth
from benchmarks.replay.runs import SearchTruth, read_truth
from benchmarks.unseen.device import UnseenDevice
from benchmarks.unseen.truth import draw_truth
from bexp.explorer.cost.composition import Floats, required_table
from bexp.explorer.cost.step import memory_limit
from bexp.explorer.dimensions.experts import DEFAULT_EXPERTS
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.exports.choice import choose
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.exports.export import export
from bexp.explorer.records.event import EventCode
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Measure, Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.explorer.search.trainer_terms import find_missing
from bexp.explorer.trainers.document import ExportError
from bexp.explorer.trainers.registry import FORMATS, TRAINERS
from bexp.trainer.recommended_setup import RecommendedSetup
from bexp.workers.replay.profiler import VirtualClock

LOGIT_BYTES = 2 + 4 + 4
"""A full logit in bfloat16, its float32 copy, and the gradient of that."""
FEWEST = 2
"""A space with fewer candidates has nothing to choose."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an exploration ended with: its trials, the micro-batch of the last log line, and the recommendation."""

    source: ExportSource
    logged: int
    recommendation: Recommendation


@dataclass(frozen=True, slots=True)
class AnswerForTrainer:
    """An exploration and its export: the micro-batch by place, and the regret of what is exported."""

    name: str
    seed: int
    trainer: str
    sizes: dict[str, int]
    one_candidate: bool
    regret: float
    confidence: int

    @property
    def agrees(self) -> bool:
        """Whether all places have one micro-batch and one candidate."""
        return self.one_candidate and len(set(self.sizes.values())) == 1


def for_trainer(request: ExplorationRequest, name: str) -> ExplorationRequest:
    """Return the request for a trainer, without what it cannot be told, with the sizes that divide the batch."""
    trainer, document = TRAINERS[name], request.model_dump(mode="json")
    document["training"] = {key: value for key, value in document["training"].items() if key != "loss"}
    experts = [b for b in request.expert_backends or () if b in DEFAULT_EXPERTS or not trainer.lacks("experts", b)]
    policies = [policy.value for policy in request.recompute or () if trainer.has_policy(policy)]
    document |= {"trainer": name, "micro_batch_size": "auto", "expert_backends": experts or None}
    document |= {"recompute": policies or None}
    if trainer.lacks("bta_tile", 1):
        document["bta"] = {"enable": False}
    if not trainer.keeps_float32 or "pure" not in trainer.precisions:
        document["training"]["optimizer"]["master_dtype"] = "float32" if trainer.keeps_float32 else None
    return ExplorationRequest.model_validate(document)


def search(truth: SearchTruth, device: Measure, clock: VirtualClock, seed: int) -> Found | None:
    """Explore; None if nothing is recommended."""
    request = truth.request.model_copy(update={"seed": seed})
    trials: list[Trial] = []
    logged, known = 0, None
    for step in explore(request, truth.report, device, clock=clock, prune=lambda *_: truth.prune):
        trials += [] if step.trial is None else [step.trial]
        known = step.recommendation or known
        told = [event for event in step.events if event.code is EventCode.RECOMMENDATION]
        logged = told[-1].data["recommendation"]["candidate"]["micro_batch_size"] if told else logged
    if known is None:
        return None
    return Found(ExportSource("job", request, truth.report, known, trials), logged, known)


def answer_for_trainer(seed: int, name: str) -> AnswerForTrainer | None:
    """Explore an unseen device for a trainer; None if the trainer can be told hardly anything of its space."""
    try:
        truth = draw_truth(seed, change=lambda request: for_trainer(request, name))
    except EmptySpaceError:
        return None
    if np.count_nonzero(truth.tokens_C) < FEWEST:
        return None
    clock = VirtualClock()
    found = search(truth, UnseenDevice(truth, seed, clock), clock, seed)
    if found is None:
        return None
    request, known = found.source.request, found.recommendation
    assert request is not None, "it was explored"
    choice = choose(TRAINERS[name], found.source, request, known)
    document = {"recommendation": known.model_dump(mode="json"), "request": request.model_dump(mode="json")}
    sizes = {
        "log": found.logged,
        "recommendation": known.candidate.micro_batch_size,
        "python": RecommendedSetup.read(document).micro_batch_size,
        "export": choice.candidate.micro_batch_size,
    }
    same = choice.candidate == known.candidate and not choice.missing and all(texts(found.source, name))
    regret = truth.regret(choice.candidate)
    return AnswerForTrainer(truth.name, seed, name, sizes, same, regret, known.confidence)


def texts(source: ExportSource, name: str) -> list[str]:
    """Return the files of a trainer's formats."""
    return [export(format_name, source).text for format_name, known in FORMATS.items() if known.trainer.name == name]


def exports_of_table(path: Path, seed: int) -> Iterator[AnswerForTrainer]:
    truth, clock = read_truth(path), VirtualClock()
    found = search(truth, truth.device(seed, clock), clock, seed)
    assert found is not None, "a table has a feasible candidate"
    request, known = truth.request, found.recommendation
    own = known.for_batch.candidate
    spare_C = _spare_bytes(truth)
    for name, trainer in TRAINERS.items():
        try:
            choice = choose(trainer, found.source, request, known)
        except ExportError:
            continue
        logits = request.seq_length * request.shapes.vocab_size * LOGIT_BYTES if "loss" in choice.missing else 0
        rates = [
            tokens
            for candidate, tokens, spare in zip(truth.table.candidates, truth.tokens_C, spare_C, strict=True)
            if find_missing(trainer, candidate, request, truth.report).keys() <= choice.missing.keys()
            and request.effective_batch_size % candidate.micro_batch_size == 0
            and logits * candidate.micro_batch_size <= spare
        ]
        reached = float(truth.tokens_C[truth.table.row[choice.candidate]])
        sizes = {"answer": own.micro_batch_size, "export": choice.candidate.micro_batch_size}
        regret = max(0.0, 1.0 - reached / max(rates))
        yield AnswerForTrainer(truth.name, seed, name, sizes, choice.is_own, regret, choice.confidence)


def _spare_bytes(truth: GroundTruth) -> Floats:
    """Return what each candidate leaves of the memory, as it was recorded, shape (C,)."""
    hardware = truth.report.hardware
    activations = np.add(*truth.table.activation_bytes(*compose(truth.recording, truth.table).sizes))
    return memory_limit(truth.request, hardware) - required_table(truth.table, activations, hardware)


def summarize(answers: Sequence[AnswerForTrainer]) -> dict[str, Any]:
    summary = {}
    for name in dict.fromkeys(answer.trainer for answer in answers):
        of = [answer for answer in answers if answer.trainer == name]
        regrets = np.array([answer.regret for answer in of])
        summary[name] = {
            "num_answers": len(of),
            "num_agree": sum(answer.agrees for answer in of),
            "regret": {
                "mean": float(regrets.mean()),
                "p95": float(np.percentile(regrets, 95)),
                "max": float(regrets.max()),
            },
        }
    return summary


def _unseen(task: tuple[int, str]) -> list[AnswerForTrainer]:
    answer = answer_for_trainer(*task)
    return [] if answer is None else [answer]


def _table(task: tuple[Path, int]) -> list[AnswerForTrainer]:
    return list(exports_of_table(*task))


def main(arguments: list[str] | None = None) -> int:
    """Explore, print the figures and write one JSON file; returns 1 if an answer and its export differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer_answers", description=__doc__)
    parser.add_argument("--seed-range", nargs=2, type=int, metavar=("FIRST", "END"), required=True)
    parser.add_argument("--table-seeds", type=int, default=5)
    parser.add_argument("--tables", type=Path, default=Path("benchmarks/results/tables"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    os.environ |= {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    unseen = [(seed, name) for seed in range(*options.seed_range) for name in TRAINERS]
    tables = [(path, seed) for path in sorted(options.tables.glob("*.jsonl")) for seed in range(options.table_seeds)]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        explored = [answer for answers in pool.map(_unseen, unseen, chunksize=5) for answer in answers]
        exported = [answer for answers in pool.map(_table, tables) for answer in answers]
    results = {"environment": describe_environment(), "commit": describe_commit(), "seed_range": options.seed_range}
    results |= {"explored": summarize(explored), "exported": summarize(exported)}
    write_results(options.out, results | {"answers": [asdict(answer) for answer in (*explored, *exported)]})
    for kind in ("explored", "exported"):
        for name, of in results[kind].items():
            regret = of["regret"]
            agree = f"{of['num_agree']} of {of['num_answers']} are the answer's own candidate"
            figures = f"regret mean {regret['mean']:.2%}, p95 {regret['p95']:.2%}, max {regret['max']:.2%}"
            print(f"{kind} for {name}: {agree}, {figures}")
    return int(any(not answer.agrees for answer in explored))


if __name__ == "__main__":
    sys.exit(main())
