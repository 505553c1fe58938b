"""When an observed training keeps what was promised for it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published_agreement import agreement

PROMISE = {
    "micro_batch_size": 4,
    "grad_accum_steps": 2,
    "format": "bfloat16",
    "format_of": "products",
    "parameter_bytes": 120,
    "trained_bytes": 20,
    "peak_bytes": 1000,
    "unit": "tokens",
    "rate": 100.0,
}
OBSERVED: dict[str, Any] = {
    "micro_steps_of_a_step": 2,
    "samples_of_a_step": 8,
    "products": [["bfloat16", 9]],
    "parameter_bytes": {"bfloat16": 100, "float32": 20},
    "trained_bytes": {"float32": 20},
    "peak_bytes": 1029,
    "tokens_per_second": 95.5,
}


def test_a_training_that_runs_as_promised_agrees() -> None:
    found = agreement(PROMISE, [OBSERVED])
    assert all(found[name] for name in ("batch", "format", "parameters", "weights", "peak", "speed"))
    assert found["peak_of_promised"] == pytest.approx(1.029)


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({"micro_steps_of_a_step": 1}, "batch"),
        ({"samples_of_a_step": 4}, "batch"),
        ({"products": [["float32", 9]]}, "format"),
        ({"trained_bytes": {"bfloat16": 10}}, "parameters"),
        ({"parameter_bytes": {"float32": 220}}, "weights"),
        ({"peak_bytes": 1031}, "peak"),
        ({"peak_bytes": 969}, "peak"),
        ({"tokens_per_second": 94.9}, "speed"),
        ({"tokens_per_second": 105.1}, "speed"),
    ],
)
def test_what_is_otherwise_than_promised_is_told(changed: dict[str, Any], broken: str) -> None:
    found = agreement(PROMISE, [OBSERVED | changed])
    assert [name for name, kept in found.items() if kept is False] == [broken]
    assert found["peak"] is (broken != "peak")


def test_a_training_whose_first_steps_have_new_widths_is_held_against_a_promise_for_an_epoch() -> None:
    """Micro-steps of 100 tokens take 1 s, and 0.5 s more for a new width, which half of the epoch's have."""
    promise = PROMISE | {"rate": 100 / 1.25, "new_widths": [[0.5, 0.5]]}
    new = [{"micro_steps": 2, "tokens": 200, "shapes": [[[1, i]], [[1, -i]]]} for i in range(1, 5)]
    first = OBSERVED | {"steps": new, "timed_steps": 3, "tokens_per_second": 100 / 1.5}
    found = agreement(promise, [first])
    assert found["speed"]
    assert found["speed_of_promised"] == pytest.approx(1.25 / 1.5)
    assert found["speed_of_promised_for_its_widths"] == pytest.approx(1.0)
    known = [{**new[0], "shapes": new[0]["shapes"]}] * 4
    later = agreement(promise, [OBSERVED | {"steps": known, "timed_steps": 3, "tokens_per_second": 100.0}])
    assert later["speed_of_promised_for_its_widths"] == pytest.approx(1.0)


def test_the_format_of_a_tuned_command_is_that_of_its_trained_weights() -> None:
    promise = PROMISE | {"format_of": "trained weights", "format": "float32"}
    assert agreement(promise, [OBSERVED])["format"]
    assert not agreement(promise, [OBSERVED | {"trained_bytes": {"bfloat16": 20}}])["format"]
