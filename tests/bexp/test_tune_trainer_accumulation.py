"""Gradients that transformers' Trainer accumulates: its own loss agrees, and what does not is found and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bexp.tune.agreement import CannotCheckError
from bexp.tune.agreement_text import in_short
from bexp.tune.ranks import Ranks
from bexp.tune.trainer_accumulation import TrainerCheck, sizes_of
from tests.tune_commands.with_losses import build


@pytest.fixture
def checked(tmp_path: Path) -> Any:
    def check(*options: str, **command: Any) -> tuple[dict[str, Any], Any]:
        trainer: Any = build(["--output_dir", str(tmp_path / "out"), *options])
        asked = (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps)
        trainer.args.bexp_asked = asked
        return TrainerCheck(trainer, trainer.train, Ranks()).answer(command), trainer

    return check


@pytest.mark.parametrize("options", [(), ("--bf16",), ("--stream",)], ids=" ".join)
def test_the_trainers_own_loss_agrees_on_texts_of_unequal_length(checked: Any, options: tuple[str, ...]) -> None:
    found, trainer = checked(*options)
    assert found["agrees"], found["text"]
    assert (found["batch_size"], found["large_micro_batch_size"], found["micro_batch_size"]) == (8, 8, 2)
    assert found["norm"] > 0.1
    assert 0 < found["spread"] < 0.02
    assert found["cause"] is None
    assert trainer.state.global_step == 0, "no optimizer step was taken"
    assert trainer.model.config.resid_pdrop == trainer.model.transformer.h[0].mlp.dropout.p == 0.1


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--loss", "divided", "--bf16"), "averaged by micro-batch"),
        (("--loss", "averaged"), "averaged by micro-batch"),
        (("--loss", "averaged", "--length", "20"), "wrong number of micro-batches"),
        (("--loss", "contrastive"), "samples depend on each other"),
        (("--loss", "router"), "router loss"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_the_cause_why_a_micro_batch_changes_a_loss_is_named(
    checked: Any, options: tuple[str, ...], cause: str
) -> None:
    found, _ = checked(*options)
    assert (found["agrees"], found["cause"]) == (False, cause), found["text"]
    assert "probable cause" in found["text"]
    assert found["reason"] in in_short(found, None)


def test_no_weight_changes_and_a_second_check_says_the_same(checked: Any) -> None:
    _, trainer = checked("--loss", "divided")
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    check = TrainerCheck(trainer, trainer.train, Ranks())
    first, second = check.answer({}), check.answer({})
    assert first["difference"] == pytest.approx(second["difference"], rel=1e-3)
    assert all(map(torch.equal, weights, trainer.model.parameters()))


def test_a_compiled_model_is_checked_without_a_compilation(checked: Any) -> None:
    _, trainer = checked()
    graphs: list[torch.fx.GraphModule] = []

    def compile_noted(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    trainer.model.compile(backend=compile_noted)
    found = TrainerCheck(trainer, trainer.train, Ranks()).answer({})
    assert (found["agrees"], graphs) == (True, []), found["text"]
    trainer.model(input_ids=torch.ones(2, 8, dtype=torch.long))
    assert graphs, "the training compiles as before"


def test_samples_of_one_length_do_not_check_those_of_others(checked: Any) -> None:
    found, _ = checked("--length", "20")
    assert found["agrees"], found["text"]
    assert "all of these have 20 tokens" in " ".join(found["text"].split())


def test_masks_that_are_drawn_anew_are_refused(checked: Any) -> None:
    found, _ = checked("--loss", "masked")
    assert list(found) == ["refused"]
    assert "something is random apart from dropout" in found["refused"]


@pytest.mark.parametrize(("loss", "cause"), [("own", None), ("contrastive", "samples depend on each other")])
def test_a_trainer_with_a_loader_of_its_own_is_followed(checked: Any, loss: str, cause: str | None) -> None:
    _, trainer = checked("--loss", loss)
    data, collate = trainer.train_dataset, trainer.data_collator
    made: list[Any] = []

    def load() -> Any:
        """As sentence-transformers' Trainer does: a sampler of whole batches, which the Trainer never asks for."""
        size = trainer.args.train_batch_size
        batches = [list(range(start, start + size)) for start in range(0, 40, size)]
        made.append(torch.utils.data.DataLoader(data, batch_sampler=batches, collate_fn=collate))
        return trainer.accelerator.prepare(made[-1])

    trainer.get_train_dataloader = load
    found = TrainerCheck(trainer, trainer.train, Ranks()).answer({})
    assert (found["agrees"], found["cause"]) == (cause is None, cause)
    number = len(made)
    assert trainer.get_train_dataloader().dataset is data
    assert len(made) == number + 1, "the Trainer has its own again"


def test_a_loader_whose_samples_have_no_places_is_refused(checked: Any) -> None:
    _, trainer = checked("--loss", "own")
    batches = list(torch.utils.data.DataLoader(trainer.train_dataset, batch_size=2, collate_fn=trainer.data_collator))
    trainer.get_train_dataloader = lambda: batches
    found = TrainerCheck(trainer, trainer.train, Ranks()).answer({})
    assert "its loader of data does not use the Trainer's order" in found["refused"]


@pytest.mark.parametrize(
    ("own", "asked", "available", "sizes"),
    [
        ((2, 4), (None, None), None, (8, 2)),
        ((4, 1), (None, None), None, (4, 2)),
        ((3, 1), (None, None), None, (3, 1)),
        ((4, 64), (None, None), None, (64, 4)),
        ((48, 2), (None, None), None, (48, 24)),
        ((2, 4), (None, None), 5, (4, 2)),
        ((8, 1), (None, None), 5, (5, 1)),
        ((2, 4), (12, None), None, (12, 2)),
        ((4, 1), (6, None), None, (6, 3)),
        ((2, 4), (None, 3), None, (9, 3)),
        ((2, 4), (16, 4), None, (16, 4)),
    ],
)
def test_the_batch_is_the_commands_own_unless_it_is_large_or_another_is_asked_for(
    own: tuple[int, int], asked: tuple[int | None, int | None], available: int | None, sizes: tuple[int, int]
) -> None:
    assert sizes_of(own, *asked, available) == sizes


@pytest.mark.parametrize(
    ("own", "asked", "available", "reason"),
    [
        ((1, 1), (None, None), None, "nothing to accumulate"),
        ((2, 4), (8, 3), None, "micro-batches of 3"),
        ((2, 4), (8, 8), None, "micro-batches of 8"),
        ((2, 4), (100, None), 50, "only 50 samples"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(
    own: tuple[int, int], asked: tuple[int | None, int | None], available: int | None, reason: str
) -> None:
    with pytest.raises(CannotCheckError, match=reason):
        sizes_of(own, *asked, available)
