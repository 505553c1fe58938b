"""Which candidate a framework is told."""

from __future__ import annotations

import pytest

from bexp.explorer.exports.exploration import ExportError, ExportSource, UnknownFormatError
from bexp.explorer.exports.registry import FORMATS, export, formats_for
from bexp.explorer.exports.trainer_settings import TrainerSettings, build_settings
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.recommendation import RunnerUpCheck, WholeModelCheck
from bexp.explorer.records.trial import TrialKind
from bexp.explorer.spec.candidate import Recompute
from bexp.explorer.spec.training import Sharding
from tests.explorer.exports.samples import GIB, OURS, candidate, exploration, trial
from tests.explorer.search.small import whole


def plan(answer: ExportSource, name: str = "transformers") -> TrainerSettings:
    return build_settings(FORMATS[name].framework, name, answer)


def test_a_trial_that_fits_and_is_faster_goes_before_the_stock_candidate() -> None:
    trials = [
        trial(candidate(16), 900.0),
        trial(candidate(32), 950.0, peak_bytes=139 * GIB),
        trial(candidate(64), 990.0, outcome=Outcome.OUT_OF_MEMORY),
        trial(candidate(24), 999.0),  # it does not divide the batch
        trial(candidate(2, expert_backend="bexp_fused"), 999.0),
    ]
    chosen = plan(exploration(OURS, stock=candidate(4), trials=trials))
    assert (chosen.micro_batch_size, chosen.grad_accum_steps) == (16, 32)
    assert plan(exploration(OURS, stock=candidate(4))).micro_batch_size == 4


def test_a_runner_up_counts_with_what_its_whole_model_reached() -> None:
    """Its blocks compose 950 tokens/s, its whole model reaches 700, and another's blocks compose 800."""
    check = WholeModelCheck(
        measurement=whole(), tokens_per_second=700.0, step_seconds=1.0, step_error=0.0, peak_error=0.0
    )
    rival = RunnerUpCheck(
        candidate=candidate(16), composed_tokens_per_second=950.0, outcome=Outcome.OK, whole_model=check
    )
    trials = [trial(candidate(16), 950.0), trial(candidate(8), 800.0)]
    assert plan(exploration(OURS, trials=trials)).micro_batch_size == 16
    assert plan(exploration(OURS, trials=trials, known={"runner_up": rival})).micro_batch_size == 8


@pytest.mark.parametrize(("reached", "size"), [((700.0, 700.0), 8), ((700.0, 1000.0), 16)])
def test_any_candidate_that_was_run_whole_counts_with_what_its_runs_reached(
    reached: tuple[float, ...], size: int
) -> None:
    """Its blocks compose 950 tokens/s, and another's compose 800."""
    ran = [trial(candidate(16), speed).model_copy(update={"kind": TrialKind.WHOLE_MODEL}) for speed in reached]
    trials = [trial(candidate(16), 950.0), *ran, trial(candidate(8), 800.0)]
    assert plan(exploration(OURS, trials=trials)).micro_batch_size == size


def test_a_runner_up_whose_whole_model_left_too_little_memory_is_not_exported() -> None:
    check = WholeModelCheck(
        measurement=whole(peak_bytes=139 * GIB),
        tokens_per_second=999.0,
        step_seconds=1.0,
        step_error=0.0,
        peak_error=0.0,
    )
    rival = RunnerUpCheck(
        candidate=candidate(16), composed_tokens_per_second=999.0, outcome=Outcome.OK, whole_model=check
    )
    found = exploration(OURS, trials=[trial(candidate(8), 800.0)], known={"runner_up": rival})
    assert plan(found).micro_batch_size == 8


def test_the_recommended_candidate_is_kept_where_it_can_be_told_whole() -> None:
    faster = [trial(candidate(16), 5000.0)]
    assert plan(exploration(candidate(8), trials=faster)).micro_batch_size == 8
    assert plan(exploration(OURS, trials=faster), "python").micro_batch_size == 8


def test_the_candidate_that_divides_the_batch_is_exported() -> None:
    with pytest.raises(ExportError, match=r"batch_size 512 is divided by no candidate that fits; .* is 504 or 528"):
        plan(exploration(candidate(24), known={"nearest_batch_sizes": (504, 528)}))
    assert plan(exploration(candidate(24), stock=candidate(4))).micro_batch_size == 4


def test_least_is_missing_where_nothing_can_be_told_whole() -> None:
    compiled = candidate(16, execution="compile", recompute=Recompute.QKV, bta_tile=None)
    answer = exploration(compiled, stock=candidate(4, execution="compile"), execution=["compile"])
    chosen = plan(answer)
    assert (chosen.micro_batch_size, chosen.compiled_layers) == (4, False)
    assert any("cannot be told compiled layers" in line for line in chosen.header)
    alone = plan(exploration(compiled, execution=["compile"]))
    assert alone.recompute is Recompute.FULL  # what was recomputed to fit stays recomputed


def test_graphs_are_for_bexp_apply_alone() -> None:
    answer = exploration(candidate(16, execution="graph"), execution=["graph"])
    assert any("cannot be told micro-steps as CUDA graphs" in line for line in plan(answer).header)
    kept = plan(answer, "python")
    assert kept.candidate.execution == "graph"
    assert not kept.compiled_layers


def test_kernels_and_loss_of_liger_are_for_bexp_apply_alone() -> None:
    answer = exploration(candidate(16, kernels="liger", loss="liger"), stock=candidate(4))
    assert plan(answer).micro_batch_size == 4
    kept = plan(answer, "python").candidate
    assert (kept.micro_batch_size, kept.kernels, kept.loss) == (16, "liger", "liger")


def test_full_logits_have_to_fit_where_the_loss_was_chunked() -> None:
    roomy = trial(candidate(2, loss="chunked"), 700.0, peak_bytes=20 * GIB)
    best = candidate(32, loss="chunked")
    answer = exploration(best, trials=[roomy], known={"required_bytes": 130 * GIB})
    chosen = plan(answer)
    assert chosen.micro_batch_size == 2
    assert any("full logits need more" in line for line in chosen.header)
    tight = plan(exploration(best, known={"required_bytes": 130 * GIB}))
    assert any("full logits are not expected to fit" in line for line in tight.header)
    assert plan(answer, "axolotl").micro_batch_size == 32


def test_sharding_that_a_framework_lacks_becomes_the_next_level() -> None:
    answer = exploration(num_devices=8, training={"sharding": "zero1"})
    assert plan(answer).sharding is Sharding.ZERO2
    assert plan(answer, "deepspeed").sharding is Sharding.ZERO1
    assert any("'zero2' is used in place of 'zero1'" in line for line in plan(answer).header)


def test_sequences_that_devices_share_are_told_where_the_layout_is_the_same() -> None:
    shared = candidate(context_parallel_size=2, context_parallel_layout="zigzag")
    answer = exploration(shared, num_devices=8, context_parallel={"sizes": [2]})
    assert plan(answer, "megatron").context_parallel_size == 2
    assert plan(answer, "megatron").grad_accum_steps == 512 // 8 // 4
    alone = plan(answer, "axolotl")
    assert (alone.context_parallel_size, alone.grad_accum_steps) == (1, 512 // 8 // 8)  # the batch is kept
    assert any("may not fit" in line for line in alone.header)


def test_there_is_nothing_to_export_without_an_answer_for_training() -> None:
    answer = exploration()
    waiting = ExportSource("job1", answer.request, answer.report, None, missing="It has not started yet.")
    with pytest.raises(ExportError, match="has not started yet"):
        plan(waiting)
    with pytest.raises(ExportError, match="mode: eval"):
        plan(exploration(mode="eval"))
    with pytest.raises(ExportError, match="cannot read it"):
        plan(ExportSource("job1", None, None, answer.recommendation))
    with pytest.raises(UnknownFormatError, match="the formats are transformers, python, accelerate"):
        export("toml", answer)


def test_a_provisional_answer_says_so() -> None:
    assert any(line.startswith("provisional:") for line in plan(exploration(final=False)).header)
    assert not any(line.startswith("provisional:") for line in plan(exploration()).header)


def test_only_a_framework_that_knows_the_capacity_of_experts_is_told_such_a_model() -> None:
    answer = exploration(candidate(capacity_factor=1.2345678))
    assert answer.recommendation is not None
    assert formats_for(answer.recommendation) == ["megatron"]
    text = export("megatron", answer).text
    for flag in ("capacity-factor 1.2345678", "token-drop-policy probs", "token-dispatcher-type alltoall"):
        assert flag in text
    with pytest.raises(ExportError, match=r"DeepSpeed cannot be told the capacity factor of the experts \(1.23457\)"):
        export("deepspeed", answer)
