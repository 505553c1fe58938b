"""What a person reads at the end."""

from __future__ import annotations

import pytest

from api.answer import bytes_text, render_answer, render_recommendation
from explorer.records.measurement import Outcome
from explorer.records.recommendation import Answer, Relaxation, RelaxationKind, RunnerUpCheck, VariantAnswer
from tests.cli.samples import ANSWER, BASE, RECOMMENDATION, REQUEST


def test_the_answer_says_everything_that_was_decided_and_measured() -> None:
    text = " ".join(render_answer(ANSWER, REQUEST).split())
    for part in (
        "Recommended micro_batch_size: 4 for tiny (train, eager, 32 tokens per sequence)",
        "bta_tile 2",
        "recompute none",
        "attention flash",
        "experts grouped_mm",
        "12,346 tokens/s per device, 1.23x base",
        "base micro_batch_size=1 bta_tile=off",
        "87 out of 100 that it is within 1% of the best",
        "80.0 ms per step (10.0 ms per micro-batch, optimizer 20.0 ms)",
        "batch_size 24 takes 6 accumulation steps",
        "5.0 GiB predicted, 4.8 GiB measured",
        "6.0 GiB of 8.0 GiB",
        "optimizer states 2.0 GiB",
        "largest that fits 1.12x over micro_batch_size=1",
        "if recomputed 1.23x over micro_batch_size=4 bta_tile=2",
        "stock best 1.37x over micro_batch_size=1 bta_tile=off recompute=none attention=math experts=loop "
        "(9,000 tokens/s, predicted in part)",
        "off by -4.3% in time, +2.1% in memory",
        "runner-up micro_batch_size=1 bta_tile=off recompute=none attention=math experts=loop: 1.045x over it",
        "as whole models: 11,005 tokens/s, peak 5.0 GiB",
        "note communication is not in the time",
        "queue 250.0 ms, timed 3.5 s",
    ):
        assert part in text


def test_a_batch_that_does_not_divide_names_its_neighbours() -> None:
    best = RECOMMENDATION.model_copy(update={"grad_accum_steps": None, "nearest_batch_sizes": (20, 28)})
    variant = ANSWER.variants[0].model_copy(update={"recommendation": best})
    text = render_answer(Answer(variants=(variant,)), REQUEST)
    assert "batch_size 24 does not divide into whole micro-batches; the nearest that do: 20 and 28" in text


def test_devices_that_share_a_sequence_are_named() -> None:
    shared = {"context_parallel_size": 4, "context_parallel_layout": "zigzag"}
    best = RECOMMENDATION.model_copy(update={"candidate": RECOMMENDATION.candidate.model_copy(update=shared)})
    text = " ".join(" ".join(render_recommendation(best, REQUEST)).split())
    assert "context parallel 4 devices per sequence, zigzag" in text
    assert "context parallel" not in " ".join(render_recommendation(RECOMMENDATION, REQUEST))


def test_variants_stand_side_by_side_and_a_failed_one_says_why() -> None:
    other = VariantAnswer(num_query_groups=1, num_parameters=99, recommendation=None, reason="needs 9 GiB")
    text = render_answer(Answer(variants=(*ANSWER.variants, other)), REQUEST)
    rows = [line.split() for line in text[text.index("Variants") :].splitlines()[2:4]]
    assert rows[0][:5] == ["4", "123,456", "4", "12,346", "87"]
    assert rows[1] == ["1", "99", "-", "-", "-", "needs", "9", "GiB"]


def test_nothing_fits_says_why() -> None:
    nothing = VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=None, reason="use zero3")
    assert render_answer(Answer(variants=(nothing,)), None) == "No candidate fits: use zero3"


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
    lines = render_answer(Answer(variants=(nothing,)), None).splitlines()[2:]
    assert [" ".join(line.split()) for line in lines] == [
        "Any one of these changes is predicted to make it fit. The first one is preferred.",
        "micro batch size micro_batch_size 8: peak 5.0 GiB, 6.0 GiB with reserve",
        "num devices num_devices 16: peak 7.0 GiB, 8.0 GiB with reserve",
    ]


def test_a_runner_up_that_did_not_run_says_why() -> None:
    rival = RunnerUpCheck(
        candidate=BASE, composed_tokens_per_second=1.0, outcome=Outcome.OUT_OF_MEMORY, reason="too much"
    )
    best = RECOMMENDATION.model_copy(update={"runner_up": rival})
    text = " ".join(" ".join(render_recommendation(best, REQUEST)).split())
    assert "experts=loop: out_of_memory as a whole model: too much" in text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes(size: int, text: str) -> None:
    assert bytes_text(size) == text
