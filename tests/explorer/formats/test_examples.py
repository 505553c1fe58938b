"""Every example is accepted, and is the model that it says it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.request.request import ExplorationRequest

EXAMPLES = Path(__file__).parents[3] / "examples"

PUBLISHED: dict[str, tuple[int, int]] = {
    "gpt2-124m": (124_439_808, 1024),
    "cerebras-gpt-1.3b": (1_315_723_264, 2048),
    "cerebras-bta": (111_050_496, 2048),
    "llama-3.2-1b": (1_235_814_400, 8192),
    "llama-3.1-8b": (8_030_261_248, 8192),
    "mixtral-8x7b": (46_702_792_704, 4096),
    "olmoe-1b-7b": (6_919_161_856, 4096),
    "qwen3-30b-a3b": (30_532_122_624, 4096),
}
"""Parameters of the checkpoints themselves, tied embeddings counted once, and the length of a sequence."""


def read(name: str) -> ExplorationRequest:
    return parse_request(load_document((EXAMPLES / f"{name}.yaml").read_text()), overrides={"target": "bexp"})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_accepted(path: Path) -> None:
    assert parse_request(load_document(path.read_text()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_lengths_are_the_published_ones(name: str) -> None:
    model = read(name).shapes
    assert (count_parameters(model), model.seq_length) == PUBLISHED[name]


def test_cerebras_gpt_agrees_with_gpt2_of_the_same_shape() -> None:
    shape = {"model_type": "gpt2", "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_positions": 2048}
    imported = parse_request(shape, overrides={"target": "bexp"}).shapes
    ours = read("cerebras-gpt-1.3b").shapes
    assert ours.model_copy(update={"name": imported.name}) == imported


def test_the_demo_is_small_enough_for_a_laptop() -> None:
    request = read("tiny-moe")
    assert request.shapes.moe is not None
    assert request.device_kind == "cpu"
    assert count_parameters(request.shapes) < 10_000_000
    assert request.budget.max_seconds <= 60
