from collections.abc import Callable

import pytest
import torch

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.parameters import count_embedding, count_head, count_layer
from bexp.explorer.model.model import DType, ModelSpec
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.passes import Passes
from bexp.measure.timing import LocalReducer, Reducer, Timing, WaitingPasses
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.profiler.trials.component import measure_optimizer
from bexp.workers.targets.reference.target import ReferenceTarget
from bexp.workers.training.optimizer import TrainingOptimizer
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
