"""TRL: its loss."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.formats.document import FormatError
from tests.explorer.formats.test_trainer_files import read


def test_the_loss_of_trl_is_said_not_to_be_measured() -> None:
    changes: tuple[dict[str, Any], ...] = ({}, {"loss_type": "nll"}, {"loss_type": "chunked_nll"})
    for change in changes:
        asked = read("trl", **change)
        assert asked.losses == ("library",)
        assert any("That loss is not measured" in notice and "less memory" in notice for notice in asked.notices)


@pytest.mark.parametrize("trainer", ["trl", "llamafactory"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "holds all logits"),
        ({"full_determinism": True}, "slower"),
        ({"torch_empty_cache_steps": 4}, "slower"),
        ({"torch_compile_mode": "max-autotune"}, "compiles the whole model"),
        ({"torch_compile_backend": "inductor"}, "compiles the whole model"),
        ({"accelerator_config": {"split_batches": True}}, "number of processes"),
    ],
)
def test_arguments_that_change_a_step_are_refused(trainer: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read(trainer, **changes)


def test_arguments_that_are_off_change_nothing() -> None:
    off: dict[str, Any] = {
        "pad_to_multiple_of": "auto",
        "label_smoothing_factor": 0.0,
        "full_determinism": False,
        "torch_compile_mode": None,
    }
    assert not any("not read" in notice for notice in read("trl", **off).notices)
