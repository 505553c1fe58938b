"""Bytes of modules that can be counted by hand."""

import pytest
import torch
from torch import Tensor, nn

from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.memory_meters import ActivationBytes, measure_memory
from bexp.measure.passes import ModulePasses
from bexp.workers.targets.reference.factory import build_block, example_inputs
from bexp.workers.targets.reference.target import BlockPasses
from tests.workers.profiler.samples import MODEL, REQUEST

CPU = torch.device("cpu")
ROWS, WIDTH, WIDE = 32, 16, 48


class TwoMatrices(nn.Module):
    """relu(x a) b: keeps x (its caller's), the relu's result, and the output."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, WIDE))
        self.b = nn.Parameter(torch.randn(WIDE, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.a) @ self.b


def measure_block_memory(
    block: nn.Module, x: Tensor, *, training: bool = True, gradient: torch.dtype = torch.float32
) -> ActivationBytes:
    x.requires_grad_()
    return measure_memory(ModulePasses(block, (x,), training=training, gradient_dtype=gradient), CPU)


def test_eval_leaves_the_output_alone() -> None:
    measured = measure_block_memory(TwoMatrices().requires_grad_(False), torch.randn(ROWS, WIDTH), training=False)
    assert measured == ActivationBytes(saved=ROWS * WIDTH * 4, forward_peak=2 * ROWS * WIDE * 4, backward_peak=0)


@pytest.mark.parametrize("kind", [ComponentKind.ATTENTION, ComponentKind.DENSE_FFN, ComponentKind.MOE_FFN])
def test_a_block_recomputed_as_a_whole_is_measured_without_that(kind: ComponentKind) -> None:
    backend = {ComponentKind.ATTENTION: "flash", ComponentKind.MOE_FFN: "grouped_mm"}.get(kind)
    plain = Component(kind=kind, micro_batch_size=2, backend=backend)
    again = plain.model_copy(update={"recompute": BlockRecompute.FULL})
    assert measure_component_memory(plain) == measure_component_memory(again)


def test_tiles_stay_recomputed_under_whole_recomputation() -> None:
    plain = Component(kind=ComponentKind.ATTENTION, micro_batch_size=4, backend="flash")
    tiled = plain.model_copy(update={"bta_tile": 1, "recompute": BlockRecompute.FULL})
    output = 4 * MODEL.seq_length * MODEL.hidden_size * 4
    assert measure_component_memory(tiled).saved == output
    assert measure_component_memory(tiled).backward_peak < measure_component_memory(plain).backward_peak


def test_what_is_saved_grows_with_the_micro_batch_alone() -> None:
    for kind, backend in ((ComponentKind.ATTENTION, "flash"), (ComponentKind.DENSE_FFN, None)):
        one, three = (
            measure_component_memory(Component(kind=kind, micro_batch_size=m, backend=backend)).saved for m in (1, 3)
        )
        assert three == 3 * one


def measure_component_memory(component: Component, request: ExplorationRequest = REQUEST) -> ActivationBytes:
    block = build_block(MODEL, component, request, CPU)
    inputs = example_inputs(MODEL, component, CPU)
    return measure_memory(BlockPasses(block, inputs, training=True, gradient_dtype=torch.float32), CPU)


class Double(nn.Module):
    """x times two: keeps nothing for backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0


def test_the_incoming_gradient_is_not_counted_and_that_of_the_input_is() -> None:
    size = ROWS * WIDTH * 4
    measured = measure_block_memory(Double(), torch.randn(ROWS, WIDTH))
    assert measured.saved == measured.forward_peak == size
    assert size <= measured.backward_peak <= size + 16, "scalars of the loss apart"


@pytest.mark.parametrize("shape", [(WIDTH,), (ROWS, WIDTH), ()], ids=["a vector", "a matrix", "a loss"])
def test_outputs_of_every_shape_are_run_backward_through(shape: tuple[int, ...]) -> None:
    module = Double()
    passes = ModulePasses(module, (torch.randn(shape, requires_grad=True),), training=True)
    measure_memory(passes, CPU)
    assert sum(t.grad is not None for t in passes.existing_tensors()) == 1
