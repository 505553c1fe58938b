"""What a person reads at the end, in all and in six lines."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.api.examples import RUN_REPORT
from bexp.explorer.answers.answer import _time_spent
from bexp.explorer.answers.lines import render_run_report
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.meshes.mesh import Mesh, MeshPlan, PipelinePicture, PlanPart
from bexp.explorer.model.amounts import bytes_text
from bexp.explorer.model.target import OWN_ATTENTION
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.event import end_event, recommendation_event
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.records.recommendation import (
    Answer,
    Note,
    NoteCode,
    Recommendation,
    Relaxation,
    RelaxationKind,
    Role,
    TextFigures,
    VariantAnswer,
    WholeModelCheck,
)
from bexp.explorer.records.run_report import RunReport
from bexp.explorer.request.request import ExplorationRequest
from tests.api.cli.samples import (
    ANSWER,
    BASE,
    BEST,
    GIB,
    RECOMMENDATION,
    REQUEST,
    TINY,
    UNDIVIDED,
    alternative,
    said_of,
    told,
)
from tests.explorer.alternatives import other_of, with_alternatives, without
from tests.explorer.exports.samples import PARTS, exploration
from tests.explorer.search.small import REPORT


def test_the_answer_says_everything_that_was_decided_and_measured() -> None:
    text = said_of(ANSWER, REQUEST)
    for part in (
        "Recommended micro_batch_size: 4 for tiny batch batch_size 24: 4 divides it, in 6 accumulation steps",
        "explored train, 32 tokens per sequence",
        "bta_tile 2",
        "recompute none",
        "attention flash",
        "experts grouped_mm",
        "speed 11,500 tokens/s per device, 1.23x micro_batch_size 1",
        "whole model ran at that speed, so this is the figure to expect",
        "composed 12,017 tokens/s of measured blocks: a step that is 4.3% shorter, and a peak that is 2.1% higher",
        "base micro_batch_size=1 bta_tile=off",
        "87 out of 100 that nothing is more than 1% faster",
        "84.0 ms per step (11.0 ms per micro-batch, optimizer 20.0 ms)",
        "5.0 GiB in the whole model, 4.8 GiB composed of measured blocks, 5.0 GiB predicted by formulas",
        "memory or speed 5.0 GiB at 11,500 tokens/s is the fastest",
        "within 1% nothing smaller is known",
        "within 3% 2.0 GiB, 2.2% slower: micro_batch_size=1 bta_tile=off",
        "memory 5.0 GiB at the peak, 6.0 GiB with reserve, of 8.0 GiB",
        "optimizer states 2.0 GiB",
        "largest that fits 1.12x over micro_batch_size=1",
        "if recomputed 1.23x: it is the recommended one",
        "stock best 1.37x over micro_batch_size=1 bta_tile=off recompute=none attention=math experts=loop "
        "(8,394 tokens/s, predicted in part)",
        "runner-up micro_batch_size=1 bta_tile=off recompute=none attention=math experts=loop: 11,005 tokens/s as a "
        "whole model, and its blocks compose a step that is",
        "; the recommended one is 1.045x as fast",
        "note communication is not in the time",
        "4.0 s in total: timed 3.5 s; before it, 250.0 ms in the queue",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("fields", "heading"),
    [
        (
            {"precision": "autocast", "lora": {"r": 8, "target_modules": "all-linear"}},
            "train, eager or compile, 32 tokens per sequence, autocast, LoRA of rank 8 ",
        ),
        ({"precision": "master"}, "32 tokens per sequence, master weights"),
    ],
)
def test_the_heading_says_how_a_transformers_model_was_trained(fields: dict[str, Any], heading: str) -> None:
    config = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 32, "execution": ["eager", "compile"]}
    text = said_of(ANSWER, ExplorationRequest.model_validate(config | {"training": fields}))
    assert "explored target transformers, " in text
    assert heading in text


def test_the_weights_of_adapters_are_counted_and_named() -> None:
    source = exploration(training={"lora": {"r": 8, "target_modules": "linear-modules"}})
    assert source.report is not None
    parts = PARTS.model_copy(update={"adapted": {"q_proj": 4000, "o_proj": 3168}})
    report = source.report.model_copy(update={"parts": parts})
    text = " ".join(told(ANSWER, source.request, report).split())
    assert "LoRA of rank 8 (7,168 weights in q_proj, o_proj)" in text


def test_what_texts_of_unequal_length_mean_stands_in_the_answer() -> None:
    fields = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 32, "lengths": {16: 900, 40: 100}}
    figures = TextFigures(
        batching="padded",
        num_texts=1000,
        num_cut=100,
        counted=True,
        tokens_per_sequence=17.6,
        padding_share=0.314,
        expected_peak_bytes=3 << 30,
        high_peak_bytes=5 << 30,
        out_of_memory_probability=0.0123,
    )
    best = RECOMMENDATION.model_copy(update={"texts": figures})
    request = ExplorationRequest.model_validate(fields)
    text = said_of(best, request)
    assert "32 tokens per sequence, padded texts" in text
    assert "texts padded; 31% of the computed tokens are padding, which tokens/s leave out" in text
    assert "epoch 1,000 texts; 100 are longer than a sequence and cut" in text
    assert "peaks 3.0 GiB of a micro-batch in the mean, at most 5.0 GiB of 99.9% of them" in text
    assert "a chance of 1.2% that an epoch runs out of memory" in text
    answer = Answer(variants=(ANSWER.variants[0].model_copy(update={"recommendation": best}),))
    short = said_of(answer, request, brief=True)
    assert "texts padded; 31% of the computed tokens are padding" in short
    full = best.model_copy(update={"texts": figures.model_copy(update={"batching": "packed", "padding_share": 0.0})})
    text = said_of(full, request)
    assert "texts packed; every row is full epoch 1,000 texts" in text
    assert "chance" not in text


@pytest.mark.parametrize(
    ("gain", "change"), [(1.25, "BTA gains 25.0%: 1.25x over"), (0.555, "BTA costs 44.5%: 0.56x over")]
)
def test_what_tiling_gained_or_cost_has_a_line_in_six_lines_and_in_all(gain: float, change: str) -> None:
    """No whole model of an untiled candidate ran, so that its blocks are compared with those of the recommended one."""
    other = alternative(Role.UNTILED, BEST.model_copy(update={"bta_tile": None}), gain)
    beside = other.model_copy(update={"tokens_per_second": 11_500.0, "ratio": 1.0})
    tiled = answer_of(with_alternatives(RECOMMENDATION, beside))
    said = f"{change} micro_batch_size=4 bta_tile=off recompute=none attention=flash experts=grouped_mm, as measured"
    assert f"tiling {said} blocks compose both" in said_of(tiled, REQUEST)
    assert f"tiling {said} blocks compose both" in said_of(tiled, REQUEST, brief=True)
    note = Note(code=NoteCode.NOTHING_UNTILED, text="nothing is untiled")
    nothing = answer_of(RECOMMENDATION.model_copy(update={"notes": (note,)}))
    assert "tiling nothing is untiled" in said_of(nothing, REQUEST, brief=True)
    assert "tiling" not in told(ANSWER, REQUEST) + said_of(ANSWER, brief=True)


def test_a_candidate_is_not_compared_with_itself_and_a_low_confidence_is_said_first() -> None:
    alone = with_alternatives(RECOMMENDATION, alternative(Role.STOCK, BEST, 1.0), confidence=59)
    text = told(answer_of(alone), REQUEST)
    assert "stock best        1.00x: it is the recommended one" in text
    assert "Provisional: 60 was asked for" in text
    assert "Provisional" not in told(ANSWER, REQUEST)


def test_the_time_spent_has_no_total_that_is_less_than_its_parts_and_nothing_tiny() -> None:
    replayed = ANSWER.model_copy(update={"timings": {"timed": 16.0, "storage": 0.01, "total": 0.4}})
    assert told(replayed, REQUEST).endswith("time spent        timed 16.0 s")


def answer_of(best: Recommendation) -> Answer:
    return Answer(variants=(ANSWER.variants[0].model_copy(update={"recommendation": best}),))


def test_a_batch_that_does_not_divide_has_a_micro_batch_of_its_own() -> None:
    text = said_of(answer_of(UNDIVIDED), REQUEST)
    assert "batch batch_size 24: 1, in 25 accumulation steps, 5.2% slower than 4" in text
    assert "batch_size 24 does not divide into whole micro-batches of 4; the nearest that do: 20 and 28" in text
    assert (
        "for the batch micro_batch_size=1 bta_tile=off recompute=none attention=math experts=loop: 10,900 tokens/s, "
        "peak 3.0 GiB, confidence 71, predicted in part: `--micro-batch-size auto` measures it"
    ) in text
    none = without(UNDIVIDED, Role.DIVIDING, dividing_batch_sizes=(20, 28))
    text = said_of(answer_of(none), REQUEST)
    assert "no micro-batch that fits divides batch_size 24; the nearest batch sizes with one are 20 and 28" in text


def test_a_smaller_size_that_is_level_is_named() -> None:
    def text(smaller: Candidate) -> str:
        near = alternative(Role.WITHIN_1_PERCENT, smaller, 1.003, measured_peak_bytes=2 * GIB)
        return said_of(with_alternatives(RECOMMENDATION, near), REQUEST)

    level = "2 and 4 are level: 2.0 GiB in place of 5.0 GiB at 11,500 tokens/s; `--prefer memory` takes"
    alike = RECOMMENDATION.candidate.model_copy(update={"micro_batch_size": 2})
    assert f"memory or speed {level}" in text(alike)
    assert "are level" not in text(alike.model_copy(update={"recompute": Recompute.FULL}))
    assert "are level" not in text(RECOMMENDATION.candidate)


def test_what_a_request_prefers_and_leaves_free_is_said() -> None:
    saving = RECOMMENDATION.model_copy(update={"prefer": "memory", "headroom": 0.2})
    text = said_of(answer_of(saving), REQUEST)
    assert "6.0 GiB with reserve, of 8.0 GiB, which leaves 20% of the memory free as headroom" in text
    assert "memory is preferred: the fastest is micro_batch_size=4 bta_tile=2" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_break_between_words(width: int) -> None:
    text = told(answer_of(UNDIVIDED), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    words = told(answer_of(UNDIVIDED), width=1000).split()
    assert text.split() == words


def test_devices_that_share_a_sequence_are_named() -> None:
    shared = {"context_parallel_size": 4, "context_parallel_layout": "zigzag"}
    best = RECOMMENDATION.model_copy(update={"candidate": RECOMMENDATION.candidate.model_copy(update=shared)})
    text = said_of(best)
    assert "context parallel 4 devices per sequence, zigzag" in text
    assert "context parallel" not in said_of(RECOMMENDATION)


def test_variants_with_a_capacity_show_their_memory_and_what_they_drop() -> None:
    main = ANSWER.variants[0]
    assert main.recommendation is not None
    candidate = main.recommendation.candidate.model_copy(update={"capacity_factor": 1.25})
    best = main.recommendation.model_copy(update={"candidate": candidate, "dropped_share": 0.0625})
    other = main.model_copy(update={"capacity_factor": 1.25, "recommendation": best})
    failed = other.model_copy(update={"recommendation": None, "capacity_factor": 2.0})
    text = told(Answer(variants=(main, other, failed)), REQUEST, width=120)
    table = text[text.index("Variants by num_query_groups and capacity_factor (separate") :].splitlines()
    rows = [line.split() for line in table if line.split()[:1] == ["4"]]
    assert [row[1] for row in rows] == ["none", "1.25", "2"]
    assert [row[-1] for row in rows] == ["0.0%", "6.2%", "-"]
    alone = told(Answer(variants=(other,)), REQUEST, width=120)
    assert "1.25: experts drop 6.2% of the token-expert pairs under this routing" in alone


def test_variants_stand_side_by_side_and_a_failed_one_says_why() -> None:
    other = VariantAnswer(num_query_groups=1, num_parameters=99, recommendation=None, reason="needs 9 GiB")
    text = told(Answer(variants=(*ANSWER.variants, other)), REQUEST, width=120)
    rows = [line.split() for line in text[text.index("Variants") :].splitlines()[2:6]]
    assert rows[0] == ["4", "123,456", "4", "11,500", "87"]
    assert rows[1][:2] == ["micro_batch_size=4", "bta_tile=2"]
    assert rows[2:] == [["1", "99", "-", "-", "-"], ["needs", "9", "GiB"]]


def test_remedies_stand_below_in_their_order_with_what_they_need() -> None:
    found = [
        Relaxation(
            kind=kind, change=change, settings={}, predicted_peak_bytes=size << 30, required_bytes=(size + 1) << 30
        )
        for kind, change, size in (
            (RelaxationKind.MICRO_BATCH_SIZE, "micro_batch_size 8", 5),
            (RelaxationKind.NUM_DEVICES, "num_devices 16", 7),
        )
    ]
    nothing = VariantAnswer(
        num_query_groups=4, num_parameters=1, recommendation=None, reason="too large", remedies=tuple(found)
    )
    lines = told(Answer(variants=(nothing,)), None, width=120).splitlines()[2:]
    assert [" ".join(line.split()) for line in lines] == [
        "to make it fit any one of these changes is predicted to; the first one is preferred",
        "micro batch size micro_batch_size 8: peak 5.0 GiB, 6.0 GiB with reserve",
        "num devices num_devices 16: peak 7.0 GiB, 8.0 GiB with reserve",
    ]
    only = nothing.model_copy(update={"remedies": tuple(found[:1])})
    assert "to make it fit" in (text := told(Answer(variants=(only,)), None, width=120))
    assert "this change is predicted to" in text and "the first one" not in text


def test_a_runner_up_that_did_not_run_says_why() -> None:
    rival = alternative(Role.RUNNER_UP, BASE, 1.0, outcome=Outcome.OUT_OF_MEMORY, reason="too much")
    best = with_alternatives(RECOMMENDATION, rival)
    text = said_of(best)
    assert "experts=loop: out_of_memory as a whole model: too much" in text


def test_the_runner_up_of_a_mesh_names_its_sharding_once() -> None:
    sharded, mesh = BASE.model_copy(update={"sharding": Sharding.ZERO1}), Mesh(data=2, sharding=Sharding.ZERO1)
    rival = alternative(Role.RUNNER_UP, sharded, 1.0, mesh=mesh, outcome=Outcome.CRASHED, reason="too much")
    best = with_alternatives(RECOMMENDATION, rival)
    text = said_of(best)
    assert "data=2 sharding=zero1 micro_batch_size=1" in text
    assert text.count("sharding=zero1") == 1


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_an_answer_of_several_devices_shows_their_mesh() -> None:
    plan = MeshPlan(
        mesh=Mesh(tensor=2, pipeline=4, virtual_stages=2, schedule=Schedule.INTERLEAVED, data=8),
        base_mesh=Mesh(data=64),
        num_micro_batches=16,
        tokens_per_second=640_000,
        compute_share=0.8,
        exchange_share=0.125,
        bubble_share=0.075,
        layers_per_stage=(3, 4, 4, 4, 4, 4, 4, 1),
        fullest_rank=2,
        parts=(PlanPart(name="head(m=4)", share=0.9),),
        picture=PipelinePicture(seconds=0.25, ranks=(0, 2), lines=("FFff..BB", "..FFBBff")),
    )
    spread = Mesh(data=64, expert=8, overlap_degree=2)
    others = (
        alternative(Role.OTHER_MESH, BASE, 1.25, mesh=Mesh(data=64), predicted=True),
        alternative(Role.EXPERT_MODE, BASE, 1.5, mesh=spread),
    )
    best = with_alternatives(RECOMMENDATION, *others, plan=plan, whole_model=None)
    text = said_of(answer_of(best), REQUEST)
    for part in (
        "mesh tensor=2 pipeline=4 (interleaved, 2 stages a rank) data=8 sharding=none on 64 devices",
        "layers 3 4 x 6 1 per stage; rank 2 is the fullest",
        "all devices 640,000 tokens/s",
        "time 80.0% computation, 12.5% exchange, 7.5% bubble 90.0% head(m=4)",
        "the first 250.0 ms of a step, rank by rank 0 FFff..BB 2 ..FFBBff F forward, B backward, . waits;",
        "base tensor=1 pipeline=1 data=64 sharding=none micro_batch_size=1 recompute=none",
        "other mesh 1.25x over tensor=1 pipeline=1 data=64 sharding=none micro_batch_size=1",
        "expert mode no expert parallelism: 1.50x over overlapped, tensor=1 pipeline=1 expert=8 (overlapped in 2",
    ):
        assert part in text


def test_a_noisy_answer_states_its_noise_and_the_gain_of_its_log_line() -> None:
    noisy = RECOMMENDATION.model_copy(
        update={"run_noise": 0.0916, "confidences": {"0.01": 43, "0.05": 80, "0.10": 97}, "confidence": 43}
    )
    text = said_of(noisy)
    assert "by tolerance 43 for 1%, 80 for 5%, 97 for 10% noise two runs of a micro-step differ by 9.2%" in text
    assert "11,500 tokens/s per device, 1.23x micro_batch_size 1" in text
    assert "estimated performance: 1.23x base" in recommendation_event(noisy).message
    assert "tokens/s, 1.23x base, confidence 43" in end_event(answer_of(noisy), 95).message


@pytest.mark.parametrize(
    ("prefer", "said"),
    [
        ("speed", "; the recommended one is as fast, within the noise of such runs"),
        ("memory", "; the recommended one is 0.991x as fast and needs less memory"),
    ],
)
def test_a_runner_up_that_is_faster_within_the_tolerance_is_as_fast(prefer: str, said: str) -> None:
    faster = other_of(RECOMMENDATION, Role.RUNNER_UP).model_copy(update={"ratio": 0.991})
    found = with_alternatives(RECOMMENDATION, faster, prefer=prefer)
    assert said in said_of(found)


def summary(best: Recommendation = RECOMMENDATION, request: ExplorationRequest | None = REQUEST, **more: Any) -> str:
    main = ANSWER.variants[0].model_copy(update={"recommendation": best, **more})
    return said_of(Answer(variants=(main,)), request, brief=True)


def test_the_first_line_names_the_device_that_was_measured() -> None:
    main = ANSWER.variants[0].model_copy(update={"recommendation": None, "reason": "nothing fits"})
    nothing = Answer(variants=(main,))
    for answer, first in ((ANSWER, "Recommended micro_batch_size: 4 for tiny"), (nothing, "No recommendation")):
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


def test_a_provisional_answer_says_what_would_make_it_surer() -> None:
    asked = ExplorationRequest.model_validate({**TINY, "budget": {**TINY["budget"], "confidence_target": 95}})
    assert "faster. Provisional: 95 was asked for; explore again with a higher --max-seconds" in summary(request=asked)
    assert "asked for; nothing that is left to measure is" in summary(request=asked, completed_target=95)
    noisy = RECOMMENDATION.model_copy(update={"notes": (Note(code=NoteCode.NOISE, text="so noisy"),)})
    assert "when nothing else runs here" in summary(noisy, asked)
    assert "--max-trials" not in summary(noisy, asked)
    sure = ". It is 96 for 5%, which `tolerance: 0.05` asks for"
    for best, completed in ((noisy, None), (RECOMMENDATION, 95)):
        levels = best.model_copy(update={"confidences": {"0.01": 94, "0.05": 96, "0.10": 99}})
        assert sure in summary(levels, asked, completed_target=completed)
        assert sure not in summary(levels, asked.model_copy(update={"tolerance": 0.05}), completed_target=completed)
    assert "which `tolerance" not in summary(noisy, asked)


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
    for brief in (True, False):
        assert told(Answer(variants=(nothing,)), brief=brief) == "No recommendation: nothing fits"


@pytest.mark.parametrize("whole_model", [None, RECOMMENDATION.whole_model])
def test_code_of_a_persons_own_is_measured_whole(whole_model: WholeModelCheck | None) -> None:
    own = Candidate(micro_batch_size=4, attention_backend=OWN_ATTENTION, num_query_groups=1)
    best = without(RECOMMENDATION, Role.RUNNER_UP, candidate=own, whole_model=whole_model)
    answer = Answer(variants=(ANSWER.variants[0].model_copy(update={"recommendation": best}),))
    whole, summary = told(answer), told(answer, brief=True)
    assert "in whole steps of its own code" in whole
    assert not {"composed", "blocks", "about"} & set(f"{whole} {summary}".split())


def test_a_long_wait_hides_no_activity() -> None:
    timings = {"total": 310.0, "queue": 36000.0, "timed": 200.0, "process_start": 100.0}
    spent = _time_spent(timings)
    assert spent.startswith("310.0 s in total: timed 200.0 s, process start 100.0 s; before it, ")
    assert _time_spent({"queue": 1e-3, "timed": 200.0}) == "timed 200.0 s"
