from collections.abc import Callable
from typing import Any

import pytest
import torch

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.parameters import count_embedding, count_head, count_layer, count_parameters, count_states
from bexp.explorer.cost.step import static_parts
from bexp.explorer.model.model import DType, ModelSpec
from bexp.explorer.model.training import OptimizerSpec, TrainingSpec
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.passes import Passes
from bexp.measure.timing import LocalReducer, Reducer, Timing, WaitingPasses
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.profiler.trials.component import measure_optimizer
from bexp.workers.targets.reference.target import ReferenceTarget
from bexp.workers.training.optimizer import MuonOptimizer, TrainingOptimizer
from tests.workers.profiler.samples import MODEL, candidate

OPTIMIZER = Component(kind=ComponentKind.OPTIMIZER, micro_batch_size=0, num_query_groups=2)


class OneSecond:
    """A timer for which every part of the model takes a second, and that runs it once."""

    reducer: Reducer = LocalReducer()

    def warm_up(self, passes: Passes) -> None:
        passes.prepare_forward()
        passes.forward()

    def time(self, passes: Passes, poll: Callable[[], None] = lambda: None) -> Timing:
        return Timing(1.0, 0.5, 1.0, 0.1, 7)

    def time_waiting(self, passes: Passes) -> WaitingPasses:
        return WaitingPasses(1.0, 1.0, 1.0, 1.0)


def measure(model: ModelSpec) -> ComponentMeasurement:
    instruments = Instruments(torch.device("cpu"))
    instruments.timer = OneSecond()
    request = ExplorationRequest(model=model)
    target = ReferenceTarget(request, instruments)
    return measure_optimizer(instruments, target, model, OPTIMIZER, candidate(), request, PhaseClock())


def test_layers_count_as_often_as_the_model_has_them() -> None:
    found = measure(MODEL)
    assert found.device_seconds == 4.0, "one for the ends, one dense layer, two expert layers"
    assert found.host_seconds == 2.0
    assert found.standard_error_seconds == pytest.approx(0.1 * (1 + 1 + 4) ** 0.5)


def test_a_step_allocates_what_it_converts() -> None:
    assert measure(MODEL).backward_peak_bytes < 1024, "float32 is stepped where it lies"
    half = MODEL.model_copy(update={"dtype": DType.BFLOAT16})
    largest = 4 * max(count_embedding(half) + count_head(half), *(count_layer(half, k) for k in set(half.layer_kinds)))
    assert measure(half).backward_peak_bytes == pytest.approx(largest, rel=0.01), "its gradients in float32"


SHAPES: list[dict[str, Any]] = [
    {"tie_embeddings": True, "qk_norm": "head", "qkv_bias": True, "mlp_bias": True, "norm": "layernorm"},
    {"gated_mlp": False, "position": "learned", "max_position_embeddings": 256},
    {"moe": {**MODEL.model_dump()["moe"], "shared_expert_ffn_hidden_size": 32, "shared_expert_gate": True}},
]


@pytest.mark.parametrize("changed", [{}, *SHAPES])
def test_muons_states_are_as_many_as_the_parts_and_the_whole_model_have(changed: dict[str, Any]) -> None:
    model = ModelSpec.model_validate({**MODEL.model_dump(), **changed})
    spec = OptimizerSpec(name="muon")
    request = ExplorationRequest(model=model, training=TrainingSpec(optimizer=spec))
    target = ReferenceTarget(request, Instruments(torch.device("cpu")))

    def numbers(optimizer: Any) -> int:
        assert isinstance(optimizer, MuonOptimizer)
        matrices = sum(matrix.numel() for matrix, *_ in optimizer._muons)
        return matrices + 2 * sum(parameter.numel() for parameter in optimizer._others.parameters)

    parts = sum(part.count * numbers(part.build()) for part in target.optimizer_parts(candidate(), model, request))
    assert parts == count_states(model, spec) < 2 * count_parameters(model)
    with target.training_run(candidate(), model, request) as run:
        run.begin()
        assert numbers(run.optimizer) == parts
    assert static_parts(model, request).optimizer_states == 4 * parts


@pytest.mark.parametrize("tied", [False, True])
def test_the_parts_hold_every_parameter_once(tied: bool) -> None:
    model = MODEL.model_copy(update={"tie_embeddings": tied})
    instruments, request = Instruments(torch.device("cpu")), ExplorationRequest(model=model)
    sizes = []
    for part in ReferenceTarget(request, instruments).optimizer_parts(candidate(), model, request):
        optimizer = part.build()
        assert isinstance(optimizer, TrainingOptimizer)
        sizes.append(sum(parameter.numel() for parameter in optimizer.parameters))
    dense, moe = dict.fromkeys(model.layer_kinds)
    assert sizes == [count_embedding(model) + count_head(model), count_layer(model, dense), count_layer(model, moe)]
