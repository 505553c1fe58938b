"""Searches in which memory is shorter than predicted: what saves it was left out, and is considered after all."""

from __future__ import annotations

import pytest

from bexp.explorer.cost.composition import Composition, predict_memory
from bexp.explorer.cost.step import GIB
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.records.event import EventCode, Progress
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import prune_space
from bexp.explorer.search.restored import restore_space
from tests.explorer.explorations import answer_of, lines, trials_of
from tests.explorer.search.small import REPORT, candidate, small_request
from tests.explorer.simulator import SimulatedDevice

KEPT = 4.0
"""How many times as much as predicted the layers of the device keep."""


def asked(sizes: list[int]) -> ExplorationRequest:
    """A request whose largest size fits with three times its predicted activations, and no more."""
    wide = small_request(attention_backends=["cudnn"], recompute=None, micro_batch_size=sizes, verify=False)
    assert wide.model is not None
    table = Composition([candidate(max(sizes))], wide.model, wide)
    (limit,) = predict_memory(table, REPORT.hardware, activation_share=3.0)
    return wide.model_copy(update={"memory_limit_gib": limit / GIB})


def run(req: ExplorationRequest, history: list[Progress] | None = None) -> list[Progress]:
    trials = trials_of(history or [])
    device = SimulatedDevice(req, noise=0.0, activations=KEPT)  # noise would depend on how many trials it has run
    return list(explore(req, REPORT, device, history=trials, clock=lambda: 0.0))


@pytest.mark.parametrize("sizes", [[64], [8, 64]])
def test_what_was_left_out_is_found(sizes: list[int]) -> None:
    req = asked(sizes)
    assert req.model is not None
    narrow = prune_space(req.model, req, REPORT)
    assert narrow.num_dominated > 0
    assert candidate(64) in narrow.trusted
    steps = run(req)
    answer = answer_of(steps)
    assert answer.recommendation is not None
    chosen = answer.recommendation.candidate
    tried = {trial.candidate for trial in trials_of(steps) if trial.measurement.outcome is Outcome.OK}
    assert any(one.micro_batch_size == 64 and one.recompute is not Recompute.NONE for one in tried)
    if sizes == [64]:
        assert chosen.recompute is not Recompute.NONE, "nothing else fits"
    said = [line for line in lines(steps, EventCode.SPACE) if line.startswith("Memory is short: ")]
    assert len(said) == 1, said
    *_, stored = [step.space for step in steps if step.space]
    assert stored["num_candidates"] > len(narrow.legal.candidates)


def test_a_resumed_search_goes_on_as_it_would_have_gone() -> None:
    req = asked([8, 64])
    steps = run(req)
    assert len(trials_of(steps)) > 4
    for end in range(len(trials_of(steps))):
        again = run(req, steps[:end])
        assert trials_of(steps[:end]) + trials_of(again) == trials_of(steps)
        assert answer_of(again) == answer_of(steps)


def test_an_answer_among_them_is_restored() -> None:
    """As an export needs it."""
    req = asked([64])
    assert req.model is not None
    steps = run(req)
    best = answer_of(steps).recommendation
    assert best is not None
    assert best.candidate in restore_space(req.model, req, REPORT, trials_of(steps)).legal.candidates
    assert best.candidate not in restore_space(req.model, req, REPORT, []).legal.candidates
