from __future__ import annotations

import json
from typing import Any

import pytest

from bexp.explorer.exports.export import export
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.exports.samples import exploration
from tests.explorer.formats.refusals import refusal

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "num_devices": 4}
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 64, "vocab_size": 128}
NATIVE = {"model": {**MODEL, "seq_length": 64}, "num_devices": 4}


def arguments(**fields: Any) -> ExplorationRequest:
    return parse_request({**CONFIG, "training_arguments": fields})


def deepspeed(**fields: Any) -> ExplorationRequest:
    return parse_request({**CONFIG, "deepspeed": fields})


def test_the_batch_of_training_arguments() -> None:
    request = arguments(per_device_train_batch_size=2, gradient_accumulation_steps=8, output_dir="x", logging_steps=1)
    assert (request.batch_size, request.base_micro_batch_size, request.micro_batch_choice) == (64, 2, "auto")
    assert arguments().batch_size == 8 * 4  # transformers' defaults
    few = {"training_arguments": {}, "model_type": "llama", "num_csx": 2}
    assert parse_request(few).batch_size == 16
    assert parse_request(few, overrides={"num_devices": 1}).batch_size == 8


@pytest.mark.parametrize("compiles", [{"torch_compile_backend": "inductor"}, {"torch_compile_mode": "default"}])
def test_a_backend_or_a_mode_turns_compilation_on(compiles: dict[str, str]) -> None:
    """As in TrainingArguments, also where `torch_compile` is false."""
    assert arguments(torch_compile=False, **compiles).execution == "compile"
    assert arguments(torch_compile=False, torch_compile_backend=None, label_smoothing_factor=0.0).execution != "compile"


def test_precision_sharding_and_recomputation_of_training_arguments() -> None:
    assert arguments(bf16=True).training.precision == "autocast"
    assert arguments(optim="sgd").training.optimizer.name == "sgd"
    assert arguments(optim="adamw_8bit").training.optimizer.name == "adamw_bnb_8bit"
    assert arguments(fsdp="full_shard auto_wrap").training.sharding is Sharding.ZERO3
    assert arguments(fsdp=["shard_grad_op"]).training.sharding is Sharding.ZERO2
    assert arguments(torch_compile=True).execution == "compile"
    request = arguments(gradient_checkpointing=True)
    assert request.recompute is None
    assert any("gradient_checkpointing" in notice for notice in request.notices)


@pytest.mark.parametrize("stage", range(4))
def test_stages_of_deepspeed(stage: int) -> None:
    zero = {"stage": stage, "overlap_comm": True}
    request = deepspeed(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4, zero_optimization=zero)
    assert (request.training.sharding.level, request.batch_size, request.base_micro_batch_size) == (stage, 32, 2)


ONE_DEVICE = """
model_type: llama
vocab_size: 1024
hidden_size: 64
intermediate_size: 128
num_hidden_layers: 2
num_attention_heads: 4
max_position_embeddings: 256
training_arguments: {per_device_train_batch_size: 2, gradient_accumulation_steps: 8, bf16: true}
deepspeed:
  train_batch_size: auto
  train_micro_batch_size_per_gpu: auto
  gradient_accumulation_steps: auto
  gradient_clipping: auto
  bf16: {enabled: auto}
  zero_optimization: {stage: 2, overlap_comm: true, reduce_bucket_size: auto, allgather_bucket_size: auto}
"""


def test_zero_on_one_device_is_whole_and_auto_is_what_the_arguments_say() -> None:
    document = load_document(ONE_DEVICE)
    request = parse_request(document, overrides={"model.seq_length": 128})
    assert (request.training.sharding, request.training.precision) == (Sharding.NONE, "master")
    assert (request.batch_size, request.base_micro_batch_size) == (16, 2)
    [note] = request.notices
    assert note.startswith("deepspeed.zero_optimization.stage: zero2 shards nothing on one device")
    spread = parse_request(document, overrides={"num_devices": 2})
    assert (spread.training.sharding, spread.notices) == (Sharding.ZERO2, ())
    exported = json.loads(export("deepspeed", exploration(kept=request.kept)).text)
    assert exported["gradient_clipping"] == "auto"
    assert exported["zero_optimization"] == {
        **{"stage": 0, "overlap_comm": True},
        **{"reduce_bucket_size": "auto", "allgather_bucket_size": "auto"},
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_of_one_device_are_said(stage: int) -> None:
    asked: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    request = parse_request({**CONFIG, "num_devices": 1, "deepspeed": asked})
    assert request.training.sharding is Sharding.NONE
    expected = f"buckets of gradients ({1 if stage == 3 else 2} x 500,000,000) take"
    assert any(expected in notice for notice in request.notices)
    fsdp = parse_request({**CONFIG, "num_devices": 1, "training_arguments": {"fsdp": "full_shard"}})
    assert fsdp.training.sharding is Sharding.NONE


def test_what_an_exploration_leaves_as_it_is_is_in_the_export_again() -> None:
    """Names of places are not stored, and an optimizer that was not measured is not written."""
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    request = deepspeed(optimizer=optimizer, scheduler={"type": "WarmupLR"}, wandb={"enabled": True, "team": "us"})
    assert request.kept == {"deepspeed": {"optimizer": optimizer, "scheduler": {"type": "WarmupLR"}}}
    assert "ignored, because they change nothing: deepspeed.wandb" in request.notices
    written = json.loads(export("deepspeed", exploration(kept=request.kept)).text)
    assert (written["optimizer"], written["scheduler"]) == (optimizer, {"type": "WarmupLR"})
    other = exploration(kept=request.kept, training={"optimizer": {"name": "sgd"}})
    assert "optimizer" not in json.loads(export("deepspeed", other).text)
    sharded: dict[str, Any] = {"num_devices": 2, "training": {"sharding": "zero2"}}
    small = exploration(kept={"deepspeed": {"zero_optimization": {"reduce_bucket_size": 1 << 30}}}, **sharded)
    assert any("(2 x 1,073,741,824) take 4.0 GiB" in line for line in export("deepspeed", small).header)


def test_formats_of_deepspeed() -> None:
    request = deepspeed(bf16={"enabled": True}, train_batch_size=16, optimizer={"type": "AdamW"})
    assert request.hf_config is not None
    assert (request.hf_config["dtype"], request.training.precision, request.batch_size) == ("bfloat16", "master", 16)
    half = {"enabled": True, "loss_scale": 0}
    native = parse_request({**NATIVE, "deepspeed": {"fp16": half}})
    assert (native.shapes.dtype, native.training.precision) == ("float16", "pure"), "they have master weights anyway"


def test_adapters_beside_deepspeed_are_in_float32() -> None:
    lora = {"lora": {"r": 4, "target_modules": "all-linear"}}
    request = parse_request({**CONFIG, "training": lora, "deepspeed": {"bf16": {"enabled": True}}})
    assert (request.training.precision, request.training.lora is None) == ("pure", False)
    document = {**CONFIG, "deepspeed": {"bf16": {"enabled": True}}}
    request = parse_request(document, overrides={"training.lora.r": 4, "training.lora.target_modules": "all-linear"})
    assert (request.training.precision, request.training.lora is None) == ("pure", False)
    assert parse_request(document, overrides={"target": "local.mine"}).training.precision == "pure"


def test_both_files_agree() -> None:
    inner = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "zero_optimization": {"stage": 2}}
    inner["bf16"] = {"enabled": "auto"}
    request = arguments(per_device_train_batch_size=2, bf16=True, deepspeed=inner)
    assert (request.batch_size, request.training.sharding) == (8, Sharding.ZERO2)
    assert request.training.precision == "master", "the Trainer fills in DeepSpeed's bf16"
    without = arguments(bf16=True, deepspeed={"zero_optimization": {"stage": 2}, "bf16": {"enabled": False}})
    assert without.training.precision == "autocast"
    beside = {**CONFIG, "training_arguments": {"per_device_train_batch_size": 2}}
    errors = refusal({**beside, "deepspeed": {"train_micro_batch_size_per_gpu": 4}})
    assert "contradicts" in errors["deepspeed", "train_micro_batch_size_per_gpu"]


TWO_STEPS = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("files", "location", "part"),
    [
        ({"training_arguments": {"fp16": True}}, ("training_arguments", "fp16"), "use bf16"),
        ({"training_arguments": {"optim": "galore_adamw"}}, ("training_arguments", "optim"), "supported: adamw_torch"),
        ({"training_arguments": {"deepspeed": "z.json"}}, ("training_arguments", "deepspeed"), "path of a file"),
        ({"training_arguments": {"deepspeed": {}}, "deepspeed": {}}, ("deepspeed",), ""),
        ({"training_arguments": {"fsdp": "full_shard offload"}}, ("training_arguments", "fsdp"), "leave offload out"),
        ({"training_arguments": {"use_liger_kernel": True}}, ("training_arguments", "use_liger_kernel"), "Liger"),
        *(
            ({"training_arguments": {key: value}}, ("training_arguments", key), words)
            for key, value, words in (
                ("label_smoothing_factor", 0.1, "holds all logits"),
                ("full_determinism", True, "slower"),
                ("torch_empty_cache_steps", 10, "slower"),
                ("torch_compile_backend", "cudagraphs", "inductor alone"),
                ("torch_compile_mode", "reduce-overhead", "default alone"),
                ("accelerator_config", {"split_batches": True}, "number of processes"),
                ("accelerator_config", {"gradient_accumulation_kwargs": {"num_steps": 4}}, "num_steps"),
                ("accelerator_config", "accelerator.json", "put its content here"),
            )
        ),
        ({"training_arguments": {"an_invention": 1}}, ("training_arguments", "an_invention"), "not a known field"),
        ({"training_arguments": 3}, ("training_arguments",), "must be a mapping"),
        ({"deepspeed": {"an_invention": 1}}, ("deepspeed", "an_invention"), "not a known field"),
        ({"deepspeed": {"pipeline": {"stages": 2}}}, ("deepspeed", "pipeline"), "pipeline"),
        ({"deepspeed": {"zero_optimization": {"stage": 4}}}, ("deepspeed", "zero_optimization", "stage"), "0 to 3"),
        (
            {"deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}}},
            ("deepspeed", "zero_optimization", "offload_param"),
            "what moves to the host's memory is not measured",
        ),
        ({"deepspeed": {"train_batch_size": 7} | TWO_STEPS}, ("deepspeed", "train_batch_size"), "must be 8"),
        ({"deepspeed": {"bf16": {"enabled": True}, "fp16": {"enabled": True}}}, ("deepspeed", "fp16", "enabled"), ""),
        ({"batch_size": 8, "deepspeed": {}}, ("deepspeed",), "what batch_size says"),
        ({"training": {"sharding": "zero1"}, "deepspeed": {}}, ("deepspeed",), "what training.sharding says"),
    ],
)
def test_what_cannot_be_honoured_is_named(files: dict[str, Any], location: tuple[str, ...], part: str) -> None:
    errors = refusal({**CONFIG, **files})
    found = [message for where, message in errors.items() if where[-len(location) :] == location]
    assert found, errors
    assert part in found[0]
