"""Every format, on answers that it can be told whole and on one that it cannot."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import yaml

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.export import export
from bexp.explorer.trainers.document import OF_THE_CODE, ExportDocument
from bexp.explorer.trainers.registry import FORMATS
from tests.explorer.exports.samples import SHARDED, candidate, exploration, own_exploration
from tests.explorer.exports.simulated import simulated

LEARNING = ("learning_rate", "lr_", "weight_decay", "warmup", "seed", "max_steps", "epochs", "adam_", "betas", "clip")
"""Parts of names that decide what is learnt."""

SHAPES = {"num_layers": 10, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 8}
SHAPES |= {"vocab_size": 64, "seq_length": 128}
FULL = candidate(recompute=Recompute.FULL)


def flags(made: ExportDocument, variable: str) -> list[str]:
    """The array as bash reads it."""
    script = f'{made.text}\nprintf "%s\\n" "${{{variable}[@]}}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "changes", [{"allocator": "expandable_segments"}, SHARDED], ids=["one device", "eight, sharded"]
)
def test_an_export_names_what_was_measured_and_the_allocator(name: str, changes: dict[str, Any]) -> None:
    made = export(name, exploration(**changes))
    header = "\n".join(made.header)
    assert "measured: target transformers 5.23.0, OlmoeForCausalLM on NVIDIA H200" in header
    assert "batch_size 512 = micro_batch_size 8 x" in header
    layers_of_its_own = name in {"torchtitan", "torchtitan-main", "megatron", "cerebras"}
    formats_of_its_own = name == "deepspeed" or (name == "axolotl" and "num_devices" not in changes)
    assert ("is not the code that was measured: this promises no tokens/s" in header) is layers_of_its_own
    assert ("keeps other number formats than were measured, so this promises no" in header) is formats_of_its_own
    assert ("expect about 1,000 tokens/s of each device; confidence 45" in header) is ("promises no" not in header)
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in header) is ("allocator" in changes)
    assert not any(part in made.text for part in LEARNING)
    if made.has_header:
        assert all(" ".join(line.split()) in made.text.replace('\\"', '"') for line in made.header)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_trainer_cannot_be_told_is_replaced_and_named(name: str) -> None:
    """The best has a pinned kernel and a loss in chunks, on a device that explored others as well."""
    found = simulated(22, losses=["library", "chunked"])
    made = export(name, found.source)
    header = "\n".join(made.header)
    if name == "python":
        assert "lost" not in header
        assert "in place of" not in header
        return
    assert "in place of the recommended micro_batch_size=" in header
    assert f"`--trainer {name.removesuffix('-main')}` measures it" in header
    can_pin, can_chunk = name in {"megatron", "lightning"}, name in {"torchtitan", "torchtitan-main", "cerebras"}
    assert ("cannot express the attention kernel 'cudnn'" in header) is not can_pin
    assert ("cannot express the chunked loss" in header) is not can_chunk


@pytest.mark.parametrize("name", FORMATS)
def test_without_a_stated_batch_no_file_accumulates(name: str) -> None:
    made = export(name, exploration(batch_size=None))
    for word in ("gradient_accumulation", "accumulate_grad", "global-batch-size", "global_batch_size", "train_step"):
        assert word not in made.text.split("no batch_size was stated")[-1], word
    assert any("no batch_size was stated, so set the accumulation yourself" in line for line in made.header)
    assert "in the script: Accelerator(" not in "\n".join(made.header)
    if name == "cerebras":
        assert "fit" not in yaml.safe_load(made.text)["trainer"]
    if name == "python":
        assert '"batch_size": null' in made.text


FORMATS_OF_NUMBERS: dict[str, dict[str, dict[str, Any]]] = {
    "transformers": {"pure": {}, "autocast": {"bf16": True}},
    "trl": {"pure": {"bf16": False, "fp16": False}, "autocast": {"bf16": True}},
    "accelerate": {"pure": {"mixed_precision": "no"}, "autocast": {"mixed_precision": "bf16"}},
    "deepspeed": {
        "pure": {"bf16": {"enabled": True}},  # it always has master weights
        "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        "master": {"bf16": {"enabled": True}},
    },
    "axolotl": {name: {"bf16": True} for name in ("pure", "autocast", "master")},
    "llamafactory": {"pure": {"pure_bf16": True}, "autocast": {"bf16": True}},
}
PRECISION_FIELDS = {"bf16", "fp16", "mixed_precision", "torch_autocast", "bfloat16", "float16", "pure_bf16"}


@pytest.mark.parametrize("name", FORMATS_OF_NUMBERS)
def test_the_number_formats_are_those_that_were_measured(name: str) -> None:
    for precision in ("pure", "autocast", "master"):
        expected = FORMATS_OF_NUMBERS[name].get(precision, FORMATS_OF_NUMBERS[name]["autocast"])
        made = export(name, exploration(training={"precision": precision}))
        values = yaml.safe_load(made.text)
        assert {key: value for key, value in values.items() if key in PRECISION_FIELDS} == expected, precision
        is_float32 = name != "axolotl" and expected == FORMATS_OF_NUMBERS[name]["autocast"]
        dtype = "float32" if is_float32 else "bfloat16"
        assert any(f"make the model with dtype={dtype}" in line for line in made.header), precision


def test_number_formats_of_lightning_and_megatron() -> None:
    for precision, expected in (("pure", "bf16-true"), ("autocast", "bf16-mixed"), ("master", "bf16-mixed")):
        code = export("lightning", exploration(training={"precision": precision})).text
        assert f'precision="{expected}"' in code
        made = export("megatron", exploration(training={"precision": precision}))
        assert "--bf16" in flags(made, "MEGATRON_FLAGS")
        line = next(line for line in made.header if line.startswith("weights:"))
        assert "with float32 master weights" in line
        assert ("its memory is counted by formulas" in line) is (precision != "master")


LORA: dict[str, Any] = {"r": 8, "target_modules": ["q_proj", "v_proj"], "alpha": 32}


def test_adapters_are_exported_with_autocast_over_the_weights_as_they_are() -> None:
    answer = exploration(training={"lora": LORA})
    assert "torch_autocast" in json.loads(export("deepspeed", answer).text)
    config = "peft.LoraConfig(r=8, lora_alpha=32, target_modules=['q_proj', 'v_proj'])"
    for name in ("transformers", "accelerate", "deepspeed", "lightning", "python"):
        header = "\n".join(export(name, answer).header)
        assert config in header, name
        assert "measured in bfloat16 with adapters in float32" in header


def test_length_and_optimizer_are_exported_or_stand_in_the_header() -> None:
    """A header that a format has no field for says what the script sets."""
    answer = exploration(training={"optimizer": {"name": "sgd"}})
    for name, optimizer, length in (
        ("transformers", "optim", None),
        ("axolotl", "optimizer", "sequence_len"),
        ("llamafactory", "optim", "cutoff_len"),
    ):
        values = yaml.safe_load(export(name, answer).text)
        assert (values[optimizer], values["optim_args"]) == ("sgd", "momentum=0.9")
        assert "optim_args" not in yaml.safe_load(export(name, exploration()).text)
        assert length is None or values[length] == 4096
    for name in ("accelerate", "deepspeed", "lightning"):
        header = "\n".join(export(name, answer).header)
        assert "torch.optim.SGD(..., momentum=0.9, fused=True), as measured" in header
        assert "sequences of 4096 tokens, as measured" in header
    for name in ("megatron", "torchtitan", "torchtitan-main", "cerebras"):
        noted = [line for line in export(name, answer).header if line.startswith("optimizer: measured with")]
        assert len(noted) == 1 and "torch.optim.SGD(..., momentum=0.9, fused=True), which this file" in noted[0]
        assert not any(line.startswith("optimizer:") for line in export(name, exploration()).header)
    assert flags(export("megatron", answer), "MEGATRON_FLAGS")[4:6] == ["--seq-length", "4096"]
    assert "--training.seq_len" in flags(export("torchtitan", answer), "TORCHTITAN_FLAGS")
    assert "texts: every sequence was measured full" in "\n".join(export("transformers", answer).header)


@pytest.mark.parametrize("name", ["accelerate", "deepspeed"])
def test_a_script_is_told_whether_to_recompute(name: str) -> None:
    assert any("no gradient checkpointing, as measured" in line for line in export(name, exploration()).header)
    assert any("model.gradient_checkpointing_enable()" in line for line in export(name, exploration(FULL)).header)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("master", ["float32", None])
def test_what_a_targets_own_code_decides_is_left_to_it(name: str, master: str | None) -> None:
    setting = "gradient_checkpointing=false"
    made = export(name, own_exploration(64, setting, training={"optimizer": {"master_dtype": master}}))
    assert f"your target's setting: {setting}" in made.header
    plain = export(name, own_exploration(64))
    assert not any("your target's setting" in line for line in plain.header)
    assert any("those of your own code" in line for line in made.header)
    if made.media_type in ("application/json", "application/yaml"):
        assert not yaml.safe_load(made.text).keys() & (OF_THE_CODE | PRECISION_FIELDS)


def test_accelerate_and_deepspeed() -> None:
    made = export("accelerate", exploration(FULL, **SHARDED))
    assert yaml.safe_load(made.text) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_processes": 8,
        "mixed_precision": "no",
        "use_cpu": False,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_activation_checkpointing": True,
        },
    }
    plugin = "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=8, sync_each_batch=True)"
    assert f"# in the script: Accelerator({plugin})" in made.text
    assert "Accelerator(gradient_accumulation_steps=8)" in export("accelerate", exploration(num_devices=8)).text
    compiled = yaml.safe_load(export("accelerate", exploration(execution="compile")).text)
    assert compiled["dynamo_config"] == {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}

    made = export("deepspeed", exploration(**SHARDED))
    values = json.loads(made.text)
    assert tuple(values.pop("_bexp")) == made.header
    assert values == {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 8,
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "bf16": {"enabled": True},
    }


@pytest.mark.parametrize("name", ["transformers", "axolotl", "llamafactory"])
def test_trainers_on_accelerate_reduce_gradients_in_each_accumulation_step_where_that_was_measured(name: str) -> None:
    """Without it they hold whole gradients until the last step, which ZeRO-2 and ZeRO-3 have no memory for."""
    for level, steps, expected in (("zero3", 8, True), ("zero2", 8, True), ("none", 8, False), ("zero3", 1, False)):
        answer = exploration(num_devices=8, training={"sharding": level}, batch_size=64 * steps)
        values = yaml.safe_load(export(name, answer).text)
        told = values.get("accelerator_config") == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        assert told is expected, (level, steps)


@pytest.mark.parametrize("name", ["transformers", "accelerate", "axolotl", "llamafactory", "lightning", "torchtitan"])
def test_what_is_exchanged_more_often_than_measured_is_said(name: str) -> None:
    lines = {
        level: [line for line in made.header if line.startswith("communication")]
        for level in ("none", "zero2", "zero3")
        if (made := export(name, exploration(num_devices=8, training={"sharding": level})))
    }
    assert [line.split(" in each")[0] for line in lines["zero2"]] == ["communication: parameters are gathered"]
    assert lines["zero3"] == []
    # torchtitan reduces replicas' gradients after every backward.
    assert len(lines["none"]) == (name == "torchtitan")


@pytest.mark.parametrize("name", FORMATS)
def test_the_query_groups_that_were_explored_are_exported(name: str) -> None:
    shapes: dict[str, Any] = {"hf_config": None, "hf_seq_length": None, "model": SHAPES}
    made = [
        export(name, exploration(candidate(num_query_groups=2), num_query_groups=groups, **shapes))
        for groups in (None, [2, 8])
    ]
    said = [any("model: this is for num_query_groups=2" in line for line in one.header) for one in made]
    assert said == [False, True]
    if name == "megatron":
        told = ["--group-query-attention", "--num-query-groups", "2"]
        assert [" ".join(told) in " ".join(flags(one, "MEGATRON_FLAGS")) for one in made] == [False, True]


def test_axolotl_and_llamafactory() -> None:
    assert yaml.safe_load(export("axolotl", exploration(FULL)).text) == {
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 64,
        "bf16": True,
        "optimizer": "adamw_torch_fused",
        "sequence_len": 4096,
        "torch_compile": False,
        "gradient_checkpointing": True,
        "attn_implementation": "sdpa",
        "experts_implementation": "grouped_mm",
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    assert yaml.safe_load(export("llamafactory", exploration()).text) == {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 64,
        "disable_gradient_checkpointing": True,
        "use_reentrant_gc": False,
        "optim": "adamw_torch_fused",
        "finetuning_type": "full",
        "pure_bf16": True,
        "cutoff_len": 4096,
        "flash_attn": "sdpa",
    }
