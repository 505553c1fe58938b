"""A whole model on a mesh of ranks has the loss and the gradients of one device, however it is spread."""

from __future__ import annotations

import json

import pytest

from tests.forked_ranks import run_ranks
from tests.workers.meshes.mesh_ranks import CASES, NUM_RANKS

pytestmark = pytest.mark.slow(together="forked")

Said = dict[str, tuple[float, float]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Said]:
    folder = tmp_path_factory.mktemp("mesh")
    run_ranks("tests.workers.meshes.mesh_ranks", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS["cpu"])]


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_a_mesh_have_the_loss_and_gradients_of_one_device(found: list[Said], case: str) -> None:
    for said in found[: CASES[case][0].num_devices]:
        apart, worst = said[case]
        assert apart < 2e-5
        assert worst < 1e-3


def test_each_operation_of_each_group_is_measured_and_experts_that_exchange_tokens(found: list[Said]) -> None:
    assert all(min(said["exchanges"]) > 0 for said in found)
