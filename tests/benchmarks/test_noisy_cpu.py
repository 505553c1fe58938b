"""The benchmark of explorations on busy cores: what it says of a run, and that nothing stays busy."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.noisy_cpu import busy_cores, describe_run
from benchmarks.replay.ground_truth import GroundTruth
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.recommendation import Answer, VariantAnswer
from tests.explorer.search.small import candidate, recommendation


def truth(regrets: dict[Candidate | None, float]) -> GroundTruth:
    return cast(GroundTruth, SimpleNamespace(regret=regrets.__getitem__))


def test_a_run_has_the_regret_of_the_quiet_machine() -> None:
    found = recommendation(confidences={"0.01": 43, "0.05": 80, "0.10": 97}, run_noise=0.09)
    answer = Answer(variants=(VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=found),))
    run = describe_run(71.5, answer, truth({candidate(4): 0.03}))
    assert (run["seconds"], run["regret"], run["run_noise"]) == (71.5, 0.03, 0.09)
    assert run["confidences"]["0.05"] == 80
    nothing = Answer(variants=(VariantAnswer.without_model("none"),))
    assert describe_run(5.0, nothing, truth({None: 1.0}))["regret"] == 1.0


def test_cores_are_busy_within_the_context_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        started.append(popen(command))
        return started[-1]

    monkeypatch.setattr("benchmarks.noisy_cpu.subprocess.Popen", start)
    with busy_cores(2):
        assert [process.poll() for process in started] == [None, None]
    assert [process.returncode for process in started] == [-9, -9]
