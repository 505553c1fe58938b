"""Which components of two requests are the same."""

from __future__ import annotations

from typing import Any

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.parts import LayerPart, ModelParts
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.component_subjects import IRRELEVANT, component_subjects, subject_of
from tests.explorer.cost import described
from tests.explorer.shapes import experts, shapes
from tests.explorer.simulator import report

MODEL = shapes(8, 256, 512, heads=4, vocab=1000, length=512, name="one", moe=experts(8, 2, 128, first_k_dense=1))
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "_name_or_path": "someone/model",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "vocab_size": 1000,
    "layer_types": ["full", "sliding", "full", "sliding"],
}


def subjects(model: dict[str, Any] | None = None, **changes: Any) -> dict[str, str]:
    request = ExplorationRequest.model_validate({"model": MODEL | (model or {}), **changes})
    return {kind.value: subject for (kind, _), subject in component_subjects(request, report()).items()}


def parts(**changes: Any) -> ModelParts:
    names = ("Layer[full]", "Layer[sliding]")
    kinds = tuple(LayerPart(name=name, **described.part(10)) for name in names)
    return described.parts(**{"class_name": "LlamaForCausalLM", "layers": names * 2, "kinds": kinds, **changes})


def subjects_of_parts(config: dict[str, Any], of: ModelParts | None = None, **changes: Any) -> dict[str, str]:
    asked = {"hf_config": CONFIG | config, "hf_seq_length": 512, **changes}
    request = ExplorationRequest.model_validate(asked)
    found = component_subjects(request, report().model_copy(update={"parts": of or parts()}))
    return {f"{kind}{name or ''}": subject for (kind, name), subject in found.items()}


def test_the_layers_of_a_deeper_model_are_the_same() -> None:
    before = subjects_of_parts({})
    assert subjects_of_parts({"_name_or_path": "another/name"}, batch_size=64) == before
    deeper = subjects_of_parts({"num_hidden_layers": 6, "layer_types": ["full", "sliding"] * 3})
    assert {kind for kind in before if before[kind] != deeper[kind]} == {"optimizer"}
    padded = subjects_of_parts({}, lengths={512: 1})
    assert not set(padded.values()) & set(before.values())


def test_master_weights_are_the_optimizers_alone() -> None:
    before, master = subjects_of_parts({}), subjects_of_parts({}, training={"precision": "master"})
    assert {kind for kind in before if before[kind] != master[kind]} == {"optimizer"}
    autocast = subjects_of_parts({}, training={"precision": "autocast"})
    assert not set(autocast.values()) & set(before.values())


def test_layers_with_experts_of_a_deeper_model_are_others() -> None:
    full, sliding = parts().kinds
    mixed = parts(kinds=(full, sliding.model_copy(update={"has_experts": True})))
    before, deeper = subjects_of_parts({}, mixed), subjects_of_parts({"num_hidden_layers": 6}, mixed)
    assert {kind for kind in before if before[kind] != deeper[kind]} == {"layerLayer[sliding]", "optimizer"}


def test_code_that_somebody_has_written_is_never_the_same() -> None:
    request = ExplorationRequest.model_validate({"target": "mine", "target_config": {"width": 4}})
    with_parts: DeviceReport = report().model_copy(update={"parts": parts()})
    assert component_subjects(request, with_parts) == {}


def test_what_several_devices_measure_together_has_no_subject() -> None:
    request = ExplorationRequest(model=ModelSpec.model_validate(MODEL))
    found = component_subjects(request, report())
    shared = Component(
        kind=ComponentKind.ATTENTION, micro_batch_size=1, context_parallel_size=2, context_parallel_layout="striped"
    )
    assert subject_of(shared, found) is None
    alone = Component(kind=ComponentKind.ATTENTION, micro_batch_size=1)
    assert subject_of(alone, found) == found[ComponentKind.ATTENTION, None]


def test_only_fields_of_a_request_are_called_irrelevant() -> None:
    assert set(ExplorationRequest.model_fields) | {"labels"} >= IRRELEVANT
