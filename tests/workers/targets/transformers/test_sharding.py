"""Ranks that train a transformers model together compute what one process computes with all their data."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from bexp.explorer.cost.step import gathered_bytes, static_parts
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.model.training import Sharding
from bexp.workers.instruments.failures import UnsupportedTrialError
from tests.explorer.cost.described import parts
from tests.forked_ranks import run_ranks
from tests.workers.targets.transformers.sharded_ranks import LEVELS, NUM_RANKS, TRAINING
from tests.workers.targets.transformers.targets import open_target, request_for

pytestmark = pytest.mark.slow(together="forked")

pytest.importorskip("transformers")
KINDS = [kind for kind in TRAINING if kind != "lora" or find_spec("peft") is not None]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.workers.targets.transformers.sharded_ranks", folder, *KINDS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_ranks_are_those_of_one_process(found: list[dict[str, Any]], kind: str) -> None:
    for said in found:
        assert said[kind]["errors"].keys() == set(LEVELS)
        assert all(error < 1e-5 for error in said[kind]["errors"].values())
        assert said[kind]["changed"] > 0.5


def test_the_exchange_is_timed(found: list[dict[str, Any]]) -> None:
    for said in found:
        measured = said["communication"]
        assert 0 < measured["forward_device_seconds"] < measured["device_seconds"]
        assert 0 <= measured["slowdown"] <= 1
        assert measured["host_seconds"] >= 0


def test_peaks_have_the_gradients_that_the_level_holds(found: list[dict[str, Any]]) -> None:
    """Buckets of replicas hold copies. With ZeRO-1 a share of the gradients begins where a whole one ends."""
    for said in found:
        peaks, trained = said["peaks"], said["trained_bytes"]
        one = peaks["alone of 1"]
        assert peaks[f"alone of {NUM_RANKS}"] == pytest.approx(peaks[Sharding.NONE], rel=0.01)
        assert peaks[Sharding.NONE] == pytest.approx(one + trained, rel=0.01)
        states, share = 2 * trained / NUM_RANKS, trained / NUM_RANKS
        assert peaks[Sharding.ZERO1] == pytest.approx(one + share - states, rel=0.01)


def test_training_state_is_divided_as_the_level_says() -> None:
    model = parts()

    def bytes_at(level: Sharding) -> tuple[int, int, int]:
        request = request_for(num_devices=4, training={"sharding": level})
        found = static_parts(model, request)
        return found.parameters, found.gradients, found.optimizer_states

    assert isinstance(model, ModelParts)
    whole, trained = model.parameter_bytes, model.trainable_bytes
    share, of_trained = -(-whole // 4), -(-trained // 4)
    assert bytes_at(Sharding.NONE) == (whole, 2 * trained, 2 * trained)
    states = -(-2 * trained // 4)
    assert bytes_at(Sharding.ZERO1) == (whole + share, trained, states)
    assert bytes_at(Sharding.ZERO2) == (whole + share, of_trained, states)
    assert bytes_at(Sharding.ZERO3) == (share, of_trained, states)
    gathered = [gathered_bytes(model, request_for(num_devices=4, training={"sharding": level})) for level in LEVELS]
    assert [each.at_layer for each in gathered] == sorted(each.at_layer for each in gathered)


def test_float32_parameters_are_not_sharded() -> None:
    with pytest.raises(UnsupportedTrialError, match="precision 'pure'"):
        open_target(num_devices=2, training={"sharding": "zero3", "precision": "autocast"})
