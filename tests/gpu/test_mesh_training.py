"""Whole models on meshes of two GPUs, over NCCL, have the loss and the gradients of one device."""

from __future__ import annotations

import json

import pytest

from tests.forked_ranks import run_ranks
from tests.gpu.needs import visible
from tests.workers.meshes.mesh_ranks import NUM_RANKS, cases_of

pytestmark = visible(2)

Said = dict[str, tuple[float, float]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Said]:
    folder = tmp_path_factory.mktemp("mesh")
    run_ranks("tests.workers.meshes.mesh_ranks", folder, "cuda")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS["cuda"])]


@pytest.mark.parametrize("case", cases_of(NUM_RANKS["cuda"]))
def test_two_gpus_have_the_loss_and_gradients_of_one(found: list[Said], case: str) -> None:
    for said in found:
        apart, worst = said[case]
        assert apart < 1e-4
        assert worst < 1e-3
