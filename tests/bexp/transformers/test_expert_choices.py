"""Each expert back end that `bexp.apply` can set: gradients, weights and adapters are those of the library's loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import bexp
from bexp.explorer.model.expert_kernels import EXPERT_KERNELS
from tests.bexp.transformers import models

pytest.importorskip("transformers")
NAMES = tuple(kernel.in_library for kernel in EXPERT_KERNELS)
"""On a CPU, a loop computes in place of our kernels: what is tested is how weights and gradients get there and back."""
ON_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
TOLERANCE = 2e-5
"""Of float32 against float64, relative to the norm of a gradient."""


def set_up(model: nn.Module, name: str) -> None:
    bexp.apply(model, bexp.RecommendedSetup(bexp.Settings(experts=name), micro_batch_size=4))


def exact_step(model: nn.Module) -> models.Step:
    exact: Any = copy.deepcopy(model).double()
    inner = exact.get_base_model() if hasattr(exact, "get_base_model") else exact
    inner.set_experts_implementation("eager")
    return models.step(exact, models.batch())


def assert_near(found: models.Step, wanted: models.Step) -> None:
    assert found.gradients.keys() == wanted.gradients.keys()
    assert abs(float(found.loss - wanted.loss)) <= TOLERANCE * float(wanted.loss)
    for name, gradient in wanted.gradients.items():
        error = float((found.gradients[name].double() - gradient).norm() / gradient.norm())
        assert error <= TOLERANCE, f"{name}: {error}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model_type", models.MIXTURES)
def test_gradients_are_those_of_float64_and_weights_keep_names_and_shapes(model_type: str, name: str) -> None:
    model = models.tiny(model_type)
    before = {key: (tuple(value.shape), value.data_ptr()) for key, value in model.state_dict().items()}
    wanted = exact_step(model)
    set_up(model, name)
    assert model.config._experts_implementation == name
    assert_near(models.step(model, models.batch()), wanted)
    assert {key: (tuple(value.shape), value.data_ptr()) for key, value in model.state_dict().items()} == before
    bexp.restore(model)
    assert model.config._experts_implementation != name or name == "grouped_mm", "the library's own default"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about what peft asks it
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_adapters_on_experts_have_the_gradients_of_float64(name: str, elsewhere: bool) -> None:
    """Also those on attention alone, where the experts' weights are frozen."""
    peft = pytest.importorskip("peft")
    chosen: dict[str, Any] = {"target_modules": ["q_proj"]} if elsewhere else {"target_parameters": ON_EXPERTS}
    model = peft.get_peft_model(models.tiny("olmoe"), peft.LoraConfig(r=2, **chosen))
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:  # begins at zero, where the gradient of the other half is zero, too
            parameter.data.normal_(0.0, 0.1, generator=generator)
    wanted = exact_step(model)
    set_up(model.get_base_model(), name)
    assert all("lora_" in key for key in wanted.gradients)
    assert len(wanted.gradients) == (4 if elsewhere else 8)
    assert_near(models.step(model, models.batch()), wanted)
