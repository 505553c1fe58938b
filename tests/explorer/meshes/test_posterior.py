"""How sure a search of meshes is of steps, where the host sets the pace and where it does not."""

from __future__ import annotations

import numpy as np
import pytest

from bexp.explorer.meshes.knowledge import MeshKnowledge
from bexp.explorer.meshes.posterior import HOST_ERROR, Expected, sample_throughput
from bexp.explorer.meshes.step import MeshStep
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.measurements import measured
from tests.explorer.simulator import report

WIDTHS = {"hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4}
MODEL = {**WIDTHS, "num_layers": 3, "vocab_size": 512, "seq_length": 64}


def step_of(host_over_device: float, kind: str = "cuda") -> MeshStep:
    """The step of two data-parallel devices whose blocks take the host so many times as long as the device."""
    found = report(num_devices=2)
    hardware = found.hardware.model_copy(update={"device_kind": kind})
    asked = {"model": MODEL, "batch_size": 8, "micro_batch_size": [2], "recompute": ["none"], "num_devices": 2}
    request = ExplorationRequest.model_validate({**asked, "parallelism": {"tensor": 1}})
    space = MeshKnowledge(request, found.model_copy(update={"hardware": hardware}))
    one = space.candidates[0]
    for i, component in enumerate(space.composer.components(one)):
        seconds = 1e-3 * (1.0 + 0.37 * i)
        space.learn([measured(component, seconds, host_seconds=host_over_device * seconds)])
    return space.step(one)


def spread(step: MeshStep, expected: Expected) -> float:
    samples = sample_throughput([step], lambda _: 0.0, 0, [expected])
    return float(np.log(samples).std())


@pytest.mark.parametrize(("host", "is_bound"), [(0.5, False), (2.0, True)])
def test_a_step_whose_pace_the_host_sets_is_less_certain_until_its_whole_model_has_run(
    host: float, is_bound: bool
) -> None:
    step = step_of(host)
    assert step.host_bound is is_bound
    assert (spread(step, Expected(error=0.01)) > 0.8 * HOST_ERROR) is is_bound
    assert spread(step, Expected(error=0.01, is_own=True)) < 0.02
