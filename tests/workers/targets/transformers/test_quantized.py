"""Weights in four and eight bits: the bytes that transformers itself would hold, and what is trained over them.

These run where bitsandbytes and peft are installed: `make test-frameworks`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.cost.step import static_parts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.quantization import ARGUMENTS, describe_weights
from bexp.measure.memory_meters import measure_memory
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.targets.transformers.quantized import held_tensors, keeps_inputs, scales_of, storage_bytes
from tests.workers.targets.transformers.targets import (
    CPU,
    LLAMA,
    QWEN_MOE,
    changed_by_a_step,
    open_target,
    opened,
    parts_of,
    request_for,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
CANDIDATE = Candidate(
    micro_batch_size=2, attention_backend="sdpa", num_query_groups=1, recompute=Recompute.FULL, loss="chunked"
)
NAMES = ("bnb_4bit", "bnb_8bit")


def loaded(config: dict[str, Any], name: str, folder: Path) -> Any:
    """A model that transformers itself has loaded and quantised."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    own = transformers.CONFIG_MAPPING[config["model_type"]](**values)
    transformers.AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
        quantization_config=transformers.BitsAndBytesConfig(**ARGUMENTS[name]),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", [LLAMA | {"intermediate_size": 128}, QWEN_MOE], ids=["dense", "experts"])
def test_weights_have_the_bytes_of_what_the_library_loads(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    parts = parts_of(open_target(config, quantization=name, mode="eval"))
    theirs = loaded(config, name, tmp_path)
    buffers = storage_bytes(theirs.buffers())
    assert parts.parameter_bytes == storage_bytes(held_tensors(theirs)) - buffers
    footprint = theirs.get_memory_footprint() - buffers
    assert parts.parameter_bytes - storage_bytes(scales_of(theirs)) <= footprint <= parts.parameter_bytes
    plain = parts_of(open_target(config, mode="eval"))
    assert parts.num_parameters == plain.num_parameters
    assert parts.parameter_bytes < plain.parameter_bytes
    request = request_for(config, quantization=name, mode="eval")
    assert static_parts(parts, request).parameters == parts.parameter_bytes


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft calls and reads it
@pytest.mark.parametrize("name", NAMES)
def test_adapters_over_quantised_weights_hold_what_peft_makes_of_what_the_library_loads(
    name: str, tmp_path: Path
) -> None:
    parts = parts_of(open_target(QWEN_MOE, quantization=name, training={"lora": LORA}))
    theirs = peft.prepare_model_for_kbit_training(loaded(QWEN_MOE, name, tmp_path))
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(**LORA, lora_alpha=4))
    assert parts.parameter_bytes == storage_bytes(held_tensors(theirs)) - storage_bytes(theirs.buffers())
    trained = storage_bytes(p for p in theirs.parameters() if p.requires_grad)
    assert parts.trainable_bytes == trained


def test_the_experts_that_stay_as_they_are_stand_in_one_line() -> None:
    parts = parts_of(open_target(QWEN_MOE, quantization="bnb_4bit", training={"lora": LORA}))
    found = {weight.kind: (weight.num_bytes, weight.quantized_bytes) for weight in parts.weights}
    experts = 2 * 4 * 3 * 64 * 32 * 4  # layers, experts, matrices, in float32 as peft prepares them
    assert found["experts"] == (experts, 0)
    assert found["attention"][0] == found["attention"][1] > 2 * (64 * 64 * 2 + 64 * 32 * 2) // 2
    assert found["embeddings and head"] == (2 * 160 * 64 * 4, 0)
    assert sum(size for size, _ in found.values()) == parts.parameter_bytes
    assert "experts 0 B of 192.0 KiB" in describe_weights(parts.weights)
    assert "transformers quantises linear layers alone" in describe_weights(parts.weights)


def test_a_dense_model_names_no_experts() -> None:
    parts = parts_of(open_target(quantization="bnb_8bit", training={"lora": LORA}))
    found = {weight.kind: (weight.num_bytes, weight.quantized_bytes) for weight in parts.weights}
    rows = 3 * (2 * 96 + 64)
    assert found["dense MLP"] == (3 * 3 * 64 * 96 + 4 * rows,) * 2, "a scale for each row"
    assert "experts" not in found
    assert "linear layers alone" not in describe_weights(parts.weights)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_the_adapters_of_parts_and_of_the_whole_model(name: str) -> None:
    target, parts, request = opened(quantization=name, training={"lora": LORA})
    for component in Decomposer(parts, training=True)(CANDIDATE).components[:2]:
        with target.component(component, parts, request) as passes:
            for step in (passes.prepare_forward, passes.forward, passes.prepare_backward, passes.backward):
                step()
            module: Any = passes.module  # type: ignore[attr-defined]  # a block has one
            trained = [p for n, p in module.named_parameters() if "lora_" in n]
            assert all(p.grad is not None and bool(p.grad.any()) for p in trained)
            assert measure_memory(passes, CPU).saved > 0
    with target.training_run(CANDIDATE, parts, request) as run:
        whole: Any = run._model
        layer = whole.model.layers[0]
        assert type(layer.self_attn.k_proj).__name__ == {"bnb_4bit": "Linear4bit", "bnb_8bit": "Linear8bitLt"}[name]
        assert layer.input_layernorm.weight.dtype is torch.float32
        assert whole.get_input_embeddings()(torch.tensor([1])).requires_grad
        assert storage_bytes(held_tensors(whole)) - storage_bytes(whole.buffers()) == parts.parameter_bytes
        changed = changed_by_a_step(run)
        assert all(changed[name] and "lora_" in name for name in changed)
        assert layer.self_attn.k_proj.weight.dtype in (torch.uint8, torch.int8)


def test_layers_that_keep_their_inputs_are_not_recomputed_as_a_whole() -> None:
    kept = {}
    for name in NAMES:
        fields: dict[str, Any] = {"quantization": name, "training": {"lora": LORA}, "recompute": ["none", "groups_2"]}
        target = open_target(**fields)
        parts = parts_of(target)
        part = target._parts().layer(parts.layers[0], 2)
        kept[name] = keeps_inputs(part)
        refused = {policy for policy, why in parts.unavailable.items() if "keep their inputs" in why}
        assert refused == ({"checkpointing", "groups_2"} if kept[name] else set())
        assert ("full" in parts.policies) is not kept[name]
    assert kept == {"bnb_4bit": False, "bnb_8bit": True}
    parts = parts_of(open_target(quantization="bnb_8bit", mode="eval"))
    assert not any("keep their inputs" in why for why in parts.unavailable.values())


def test_a_checkpoint_says_how_its_weights_are_quantised() -> None:
    own = {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head", "q_proj"]}
    parts = parts_of(open_target({**LLAMA, "quantization_config": own}, training={"lora": LORA}))
    found = {weight.kind: (weight.num_bytes, weight.quantized_bytes) for weight in parts.weights}
    assert found["attention"][0] - found["attention"][1] == 3 * 64 * 64 * 4, "the projection that is skipped"


def test_experts_that_are_rebuilt_for_a_quantised_checkpoint_are_a_named_outcome() -> None:
    own = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config = {
        **{name: QWEN_MOE[name] for name in QWEN_MOE if name not in ("model_type", "num_experts")},
        "model_type": "llama4_text",
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "quantization_config": own,
    }
    with pytest.raises(UnsupportedTrialError, match="transformers replaces Llama4TextExperts as a whole"):
        parts_of(open_target(config, training={"lora": {"r": 4, "target_modules": ["q_proj"]}}))


def test_what_rests_on_the_device_counts_the_scales() -> None:
    target = open_target(quantization="bnb_4bit", training={"lora": LORA})
    parts_of(target)
    skeleton = target._parts().skeleton
    assert target.rest() == storage_bytes(held_tensors(skeleton.model))
    assert target.rest() > storage_bytes([*skeleton.model.parameters(), *skeleton.model.buffers()])


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("place", "error", "said"),
    [
        (
            "bexp.workers.targets.transformers.quantized.import_module",
            ModuleNotFoundError("No module named 'bitsandbytes'"),
            r"needs bitsandbytes: pip install 'bexp\[bitsandb",
        ),
        (
            "transformers.quantizers.quantizer_bnb_4bit.Bnb4BitHfQuantizer.validate_environment",
            RuntimeError("None of the available devices is supported"),
            "does not work here: RuntimeError: None of the avail",
        ),
        (
            "bitsandbytes.matmul_4bit",
            NotImplementedError("no kernel for\nthis device"),
            "does not work here: no kernel for this device",
        ),
    ],
    ids=["package", "device", "kernel"],
)
def test_what_is_missing_is_named(place: str, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, raising(error))
    with pytest.raises(UnsupportedTrialError, match=f"'bnb_4bit' {said}"):
        parts_of(open_target(quantization="bnb_4bit", training={"lora": LORA}))


def test_adapters_that_compute_once_and_then_no_more_are_a_named_outcome() -> None:
    lora = {**LORA, "use_dora": True}
    assert parts_of(open_target(quantization="bnb_4bit", training={"lora": lora})).trainable_bytes
    with pytest.raises(UnsupportedTrialError, match="quantization 'bnb_8bit' does not work here"):
        parts_of(open_target(quantization="bnb_8bit", training={"lora": lora}))
