"""Processes that share sequences compute what one computes with all of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bexp.kernels.context_parallel.layouts import LAYOUTS
from tests.bexp.transformers.context_parallel_ranks import MODELS, NUM_RANKS, SET_ONCE, SETTINGS
from tests.forked_ranks import run_ranks

pytestmark = pytest.mark.slow(together="forked")

pytest.importorskip("transformers")
CASES = [
    *(f"{model}, {layout}, plain" for model in MODELS for layout in LAYOUTS),
    *(f"{', '.join(SET_ONCE)}, {name}" for name in SETTINGS if name != "plain"),
]
REFUSALS = {
    "padding": "takes no padding",
    "positions": "it is not known how ranks share position_ids: leave it out",
    "no tokens": "shards input_ids or inputs_embeds, and there is none",
    "length": "the zigzag layout over 2 ranks takes sequence lengths that are a multiple of 4, not 13",
    "batches": "have different batches: give all of them the same",
    "window": "takes no window of 4 tokens",
    "dropout": "takes no dropout",
    "graphs": "CUDA graphs do not hold what devices exchange",
    "attention": "attention 'eager' cannot be spread over devices",
    "windows": "it has layers of sliding_attention",
    "rotation": "its rotation ('dynamic') depends on their length",
    "routers": "with output_router_logits",
    "recommended": "2 devices shared each sequence, in layout 'ring': hand their group over as context_parallel",
    "strict": "it was measured with whole sequences, and here 2 devices share each",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.bexp.transformers.context_parallel_ranks", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_one_device(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        errors = rank["errors"][case]
        assert errors["loss"] < 1e-6  # of logits in float32
        assert errors["gradients"] < (1e-6 if "chunks" in case else 1e-12)


def test_every_case_has_run(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert sorted(rank["errors"]) == sorted(CASES)


@pytest.mark.parametrize("use", ["items of a step", "targets", "logits", "own code", "fully_shard"])
def test_other_uses_are_those_of_one_device(found: list[dict[str, Any]], use: str) -> None:
    for rank in found:
        assert max(rank["uses"][use].values()) < 1e-5


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_shared_is_refused_with_the_reason(found: list[dict[str, Any]], kind: str) -> None:
    for rank in found:
        assert REFUSALS[kind] in rank["refusals"][kind]
