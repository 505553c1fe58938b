"""The answer in six lines."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.api.examples import RUN_REPORT
from bexp.explorer.answers.lines import render_run_report
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.target import OWN_ATTENTION
from bexp.explorer.records.recommendation import (
    Answer,
    Note,
    NoteCode,
    Recommendation,
    Role,
    VariantAnswer,
    WholeModelCheck,
)
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.request.request import ExplorationRequest
from tests.api.cli.samples import ANSWER, BASE, GIB, RECOMMENDATION, REQUEST, TINY, UNDIVIDED, said_of, told
from tests.explorer.alternatives import without
from tests.explorer.search.small import REPORT


def summary(best: Recommendation = RECOMMENDATION, request: ExplorationRequest | None = REQUEST, **more: Any) -> str:
    main = ANSWER.variants[0].model_copy(update={"recommendation": best, **more})
    return said_of(Answer(variants=(main,)), request, brief=True)


def test_the_first_line_names_the_device_that_was_measured() -> None:
    main = ANSWER.variants[0].model_copy(update={"recommendation": None, "reason": "nothing fits"})
    nothing = Answer(variants=(main,))
    for answer, first in (
        (ANSWER, "Recommended micro_batch_size: 4 for tiny"),
        (nothing, "No recommendation"),
    ):
        for brief in (True, False):
            line = told(answer, REQUEST, REPORT, width=160, brief=brief).splitlines()[0]
            assert line.startswith(first)
            assert f" on {REPORT.hardware.device_name}" in line


def test_six_lines_say_what_to_run_and_what_it_gains() -> None:
    lines = told(ANSWER, width=160, brief=True).splitlines()
    assert [line[:20].strip() for line in lines[1:]] == ["batch", "settings", "speed", "memory", "confidence", "next"]
    said = [line[20:] for line in lines[1:]]
    assert lines[0] == "Recommended micro_batch_size: 4 for tiny"
    assert said[0] == "batch_size 24: 4 divides it, in 6 accumulation steps"
    assert said[1] == "bta_tile=2 attention=flash experts=grouped_mm", "and nothing that is as in the base"
    assert said[2].startswith(
        "11,500 tokens/s per device, 1.23x micro_batch_size 1 without these settings, 1.37x the best"
    )
    assert said[3] == "5.0 GiB at the peak, 6.0 GiB with reserve, of 8.0 GiB"
    assert said[4] == "87 out of 100 that nothing is more than 1% faster"
    assert said[5].startswith("`bexp best a1b2 --json > best.json` for bexp.apply, --format NAME for a trainer")


@pytest.mark.parametrize(("whole", "peak"), [(RECOMMENDATION.whole_model, 5.0), (None, 4.75)])
def test_a_real_run_is_compared_with_the_figures_of_the_answer(whole: WholeModelCheck | None, peak: float) -> None:
    best = RECOMMENDATION.model_copy(update={"whole_model": whole})
    assert f"memory {peak:.1f} GiB at the peak" in summary(best)
    reached = {"tokens_per_second": best.expected_tokens_per_second, "peak_bytes": round(peak * GIB)}
    ran = RunReport.model_validate(RUN_REPORT["report"] | {"micro_batch_size": 4} | reached)
    assert render_run_report(ran, best).endswith("1.00x the promised speed, 1.00x the promised peak")


def test_nothing_to_change_is_said_as_it_is() -> None:
    plain = without(RECOMMENDATION, Role.STOCK, candidate=BASE, performance=1.0)
    assert "nothing else to change" in summary(plain)
    assert "which is the base" in summary(plain)
    blocks = RECOMMENDATION.model_copy(update={"whole_model": None})
    assert "speed about 12,346 tokens/s per device" in summary(blocks)


def test_a_second_size_for_the_batch_has_its_own_figures() -> None:
    assert "batch batch_size 24: 1, in 25 accumulation steps, 5.2% slower than 4, confidence 71" in summary(UNDIVIDED)


def test_a_provisional_answer_says_what_would_make_it_surer() -> None:
    asked = ExplorationRequest.model_validate({**TINY, "budget": {**TINY["budget"], "confidence_target": 95}})
    assert "faster. Provisional: 95 was asked for; explore again with a higher --max-seconds" in summary(request=asked)
    assert "asked for; nothing that is left to measure is" in summary(request=asked, completed_target=95)
    noisy = RECOMMENDATION.model_copy(update={"notes": (Note(code=NoteCode.NOISE, text="so noisy"),)})
    assert "when nothing else runs here" in summary(noisy, asked)


def test_speed_in_time_of_the_processor_says_so() -> None:
    assert "processor" not in summary()
    shared = RECOMMENDATION.model_copy(update={"notes": (Note(code=NoteCode.SHARED_CORES, text="others run"),)})
    assert "per device of processor time (slower while others use these cores), " in summary(shared)


def test_the_next_command_is_the_trainers() -> None:
    named = ExplorationRequest.model_validate({**TINY, "trainer": "megatron"})
    assert "next `bexp best a1b2 --format megatron`, -v for the whole answer" in summary(request=named)
    own = {"target": "my-gpt", "target_config": {}, "batch_size": 24}
    assert "next `bexp best a1b2 -v`" in summary(request=ExplorationRequest.model_validate(own))


@pytest.mark.parametrize(("trainer", "writes"), [("axolotl", ", as --into writes"), ("torchtune", "")])
def test_settings_of_a_trainers_own_file_are_not_said_to_be_those_of_the_base(trainer: str, writes: str) -> None:
    """Such a file may recompute, and the base does not."""
    asked = REQUEST.model_copy(update={"trainer": trainer, "base_micro_batch_size": 2})
    base = BASE.model_copy(update={"micro_batch_size": 2, "expert_backend": None})
    best = base.model_copy(update={"micro_batch_size": 4})
    said = summary(without(RECOMMENDATION, Role.STOCK, candidate=best, base=base), asked)
    assert f"settings recompute=none attention={base.attention_backend}{writes} speed" in said
    assert f"micro_batch_size 2 of the file with recompute=none attention={base.attention_backend} memory" in said


def test_without_a_recommendation_the_reason_is_all() -> None:
    nothing = VariantAnswer.model_validate(
        {**ANSWER.variants[0].model_dump(mode="json"), "recommendation": None, "reason": "nothing fits"}
    )
    assert told(Answer(variants=(nothing,)), brief=True) == "No recommendation: nothing fits"


@pytest.mark.parametrize("whole_model", [None, RECOMMENDATION.whole_model])
def test_code_of_a_persons_own_is_measured_whole(whole_model: WholeModelCheck | None) -> None:
    own = Candidate(micro_batch_size=4, attention_backend=OWN_ATTENTION, num_query_groups=1)
    best = without(RECOMMENDATION, Role.RUNNER_UP, candidate=own, whole_model=whole_model)
    answer = Answer(variants=(ANSWER.variants[0].model_copy(update={"recommendation": best}),))
    whole, summary = told(answer), told(answer, brief=True)
    assert "in whole steps of its own code" in whole
    assert not {"composed", "blocks", "about"} & set(f"{whole} {summary}".split())
