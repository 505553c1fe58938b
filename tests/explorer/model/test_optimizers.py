"""Optimizers by the names that people know, and what cannot be had with them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.model.model import DType
from bexp.explorer.model.optimizers import LIBRARY, LIBRARY_NAMES, NAMES
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.shapes import shapes

LLAMA = {"model_type": "llama", "hidden_size": 64}
MODEL = shapes(2, 64, 128, heads=4, vocab=128, length=64)


ABLE = ["bexp", "accelerate", "lightning", "axolotl", "llamafactory"]


def request(name: str, **fields: Any) -> ExplorationRequest:
    training = {"optimizer": {"name": name}} | fields.pop("training", {})
    source = {"hf_config": LLAMA, "hf_seq_length": 64} if "model" not in fields else {}
    return ExplorationRequest.model_validate({**source, "training": training, **fields})


@pytest.mark.parametrize(
    ("given", "meant"),
    [("adamw_torch", "adamw"), ("adamw_torch_fused", "adamw"), ("adamw_8bit", "adamw_bnb_8bit"), ("sgd", "sgd")],
)
def test_a_name_of_the_trainers_means_what_is_measured(given: str, meant: str) -> None:
    assert request(given).training.optimizer.name == meant


def test_axolotl_has_them_in_its_own_formats() -> None:
    found = request("adafactor", trainer="axolotl")
    assert found.training.precision == "upcast"


def test_every_optimizer_on_the_device_has_a_name_in_the_trainer() -> None:
    assert set(NAMES) == {"adamw", "sgd", *LIBRARY}
    assert set(NAMES) - set(LIBRARY_NAMES) == {"adamw_cpu_offload", "muon"}


@pytest.mark.parametrize("trainer", ["transformers", "trl", "deepspeed", "torchtitan", "megatron"])
def test_muon_is_refused_for_a_trainer_whose_file_cannot_name_it(trainer: str) -> None:
    assert {request("muon", trainer=name).training.optimizer.name for name in ABLE} == {"muon"}
    with pytest.raises(ValidationError, match=rf"cannot express the optimizer 'muon'; these can: {', '.join(ABLE)}"):
        request("muon", trainer=trainer)


@pytest.mark.parametrize("experts", [{"num_experts": 8}, {"text_config": {"n_routed_experts": 8}}])
def test_a_trainer_whose_muon_stops_at_experts_in_one_tensor_is_refused_before_the_search(
    experts: dict[str, Any],
) -> None:
    config = {**LLAMA, "model_type": "olmoe", **experts}
    for trainer in (None, *(name for name in ABLE if name != "axolotl")):
        assert request("muon", hf_config=config, trainer=trainer).training.optimizer.name == "muon"
    why = "Axolotl cannot express the optimizer 'muon' of a model with experts in one tensor; these can: bexp, "
    with pytest.raises(ValidationError, match=why):
        request("muon", hf_config=config, trainer="axolotl")
    adapters = {"lora": {"r": 4, "target_modules": ["q_proj"]}}
    assert request("muon", hf_config=config, trainer="axolotl", training=adapters).training.lora is not None
    assert request("adafactor", hf_config=config, trainer="axolotl").trainer == "axolotl"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_devices": 2, "parallelism": {"tensor": 2}}, "optimizer 'muon' is measured on whole models"),
        ({"num_devices": 2, "training": {"optimizer": {"name": "muon"}, "sharding": "zero1"}}, "without sharding"),
        ({"training": {"optimizer": {"name": "muon", "grad_dtype": "float32"}}}, "leave grad_dtype out"),
        ({"target": "local.mine", "model": None}, "needs target 'transformers'"),
    ],
)
def test_the_reference_layers_have_muon_whole_and_with_master_weights_or_none(fields: dict[str, Any], why: str) -> None:
    assert request("muon", model=MODEL).training.optimizer.has_master(DType.BFLOAT16)
    without = {"optimizer": {"name": "muon", "master_dtype": None}}
    assert not request("muon", model=MODEL, training=without).training.optimizer.has_master(DType.BFLOAT16)
    with pytest.raises(ValidationError, match=why):
        request("muon", **{"model": MODEL, **fields})


@pytest.mark.parametrize("name", ["adamw_bnb_16bit", "galore_adamw", "", 8, "paged_lion_8bit"])
def test_any_other_optimizer_is_refused_with_ways_to_measure_it(name: Any) -> None:
    with pytest.raises(ValidationError, match=r"must be one of adamw, sgd, .*bexp tune -- COMMAND"):
        request(name)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_devices": 2}, "steps in the host's memory, next to one GPU"),
        ({"device_kind": "cpu"}, "steps in the host's memory, next to one GPU"),
        ({"trainer": "trl"}, "TRL cannot express the optimizer 'adamw_cpu_offload'; these can: bexp"),
    ],
)
def test_an_optimizer_on_the_host_is_for_one_gpu_and_a_trainer_that_can_be_given_it(
    fields: dict[str, Any], why: str
) -> None:
    assert request("adamw_cpu_offload", trainer="bexp").training.optimizer.of_library is not None
    with pytest.raises(ValidationError, match=why):
        request("adamw_cpu_offload", **fields)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model": MODEL}, "needs target 'transformers'"),
        ({"training": {"optimizer": {"name": "adafactor"}, "precision": "master"}}, "without float32 master weights"),
        ({"trainer": "deepspeed"}, "DeepSpeed cannot express the optimizer 'adafactor'; these can: .*axolotl"),
        ({"training": {"optimizer": {"name": "adafactor"}, "sharding": "zero2"}, "num_devices": 2}, "without sharding"),
        ({"training": {"optimizer": {"name": "adafactor", "state_dtype": "float32"}}}, "leave state_dtype out"),
        ({"trainer": "torchtitan"}, "torchtitan cannot express the optimizer 'adafactor'; these can: .*axolotl"),
    ],
)
def test_what_cannot_be_had_with_a_librarys_optimizer_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        request("adafactor", **fields)
