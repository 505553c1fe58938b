"""Whole models wait for the device after each micro-step where the trainer of the request does."""

from __future__ import annotations

import inspect

import pytest
import torch

from bexp.explorer.trainers.registry import TRAINERS
from tests.workers.targets.transformers.targets import candidate, opened

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(("trainer", "looks"), [("transformers", 2), ("trl", 2), ("bexp", 0), ("lightning", 0)])
def test_a_whole_model_looks_at_losses_as_its_trainer_does(
    trainer: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, parts, request = opened(trainer=trainer)
    with target.training_run(candidate(), parts, request) as run:
        run.begin()
        looked: list[torch.Tensor] = []
        look = torch.Tensor.isnan

        def noted(loss: torch.Tensor) -> torch.Tensor:
            looked.append(loss)
            return look(loss)

        monkeypatch.setattr(torch.Tensor, "isnan", noted)
        run.step()
    assert len(looked) == looks, "once in each micro-step"
    assert {loss.dim() for loss in looked} <= {0}


def test_trainers_that_look_at_losses_are_those_that_are_the_librarys_trainer() -> None:
    """Which looks at them unless `logging_nan_inf_filter` is off."""
    assert transformers.TrainingArguments.__dataclass_fields__["logging_nan_inf_filter"].default is True
    assert "isnan" in inspect.getsource(transformers.Trainer)
    looking = {name for name, trainer in TRAINERS.items() if trainer.awaits_losses}
    assert looking == {"transformers", "trl", "axolotl", "llamafactory"}
