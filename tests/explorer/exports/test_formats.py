"""Every format, on answers that it can be told whole and on one that it cannot."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bexp.explorer.exports.document import OF_THE_CODE, ExportDocument
from bexp.explorer.exports.exploration import ExportError
from bexp.explorer.exports.registry import FORMATS, export
from bexp.explorer.formats.request import parse_request
from bexp.explorer.spec.candidate import Recompute
from bexp.explorer.spec.request import ExplorationRequest
from tests.explorer.exports.samples import OURS, SHARDED, candidate, exploration, own_exploration

LEARNING = ("learning_rate", "lr_", "weight_decay", "warmup", "seed", "max_steps", "epochs", "adam", "clip")
"""Parts of names that decide what is learnt."""

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
    assert ("promises no tokens/s" in header) is (name not in {"transformers", "python"})
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in header) is ("allocator" in changes)
    assert not any(part in made.text for part in LEARNING)
    if made.has_header:
        assert all(" ".join(line.split()) in made.text.replace('\\"', '"') for line in made.header)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_framework_cannot_be_told_is_replaced_and_named(name: str) -> None:
    made = export(name, exploration(OURS, stock=candidate(4)))
    header = "\n".join(made.header)
    if name == "python":
        assert "lost" not in header
        assert '"micro_batch_size": 8' in made.text
        return
    assert "in place of the recommended micro_batch_size=8" in header
    assert "that costs 20% of the tokens/s" in header
    assert "micro_batch_size 4 x 128 accumulation steps" in header
    assert "cannot be told the recomputation policy 'activations'" in header
    assert "cannot be told the expert kernels 'bexp_fused'" in header


def test_transformers_fields() -> None:
    assert json.loads(export("transformers", exploration(FULL)).text) == {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 64,
        "auto_find_batch_size": False,
        "torch_compile": False,
        "bf16": True,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "attn_implementation": "sdpa",
        "experts_implementation": "grouped_mm",
    }
    half = json.loads(export("transformers", exploration(candidate(recompute=Recompute.PARTIAL_50))).text)
    assert half["activation_checkpointing_kwargs"] == {"use_reentrant": False, "every_n_layers": 2}
    sharded = json.loads(export("transformers", exploration(FULL, **SHARDED)).text)
    assert (sharded["gradient_accumulation_steps"], sharded["fsdp"], sharded["activation_checkpointing"]) == (
        8,
        True,
        False,
    )
    assert sharded["fsdp_config"] == {"version": 2, "reshard_after_forward": True, "activation_checkpointing": True}


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_targets_own_code_decides_is_left_to_it(name: str) -> None:
    made = export(name, own_exploration(seq_length=64))
    assert any("those of your own code" in line for line in made.header)
    if made.media_type in ("application/json", "application/yaml"):
        assert not yaml.safe_load(made.text).keys() & OF_THE_CODE


def test_torchtitans_main_line_counts_the_tokens_of_a_targets_own_sequences() -> None:
    main = flags(export("torchtitan-main", own_exploration(seq_length=64)), "TORCHTITAN_FLAGS")
    assert main[1:4:2] == [str(4 * 64), str(16 * 64)]
    with pytest.raises(ExportError, match="no seq_length"):
        export("torchtitan-main", own_exploration(seq_length=1))


def test_the_python_module_leaves_the_loss_and_attention_of_a_targets_own_code() -> None:
    scope: dict[str, Any] = {}
    exec(export("python", own_exploration(seq_length=64)).text, scope)
    read = scope["bexp"].RecommendedSetup.read(scope["RECOMMENDATION"])
    assert (read.settings, read.grad_accum_steps(1)) == (scope["bexp"].Settings(), 4)
    assert scope["training_arguments"](output_dir="out", use_cpu=True).per_device_train_batch_size == 4


def test_the_python_module_holds_how_the_model_was_trained() -> None:
    scope: dict[str, Any] = {}
    training = {"optimizer": {"name": "sgd", "master_dtype": None}}
    exec(export("python", exploration(training=training, batch_size=None)).text, scope)
    read = scope["bexp"].RecommendedSetup.read(scope["RECOMMENDATION"])
    assert (read.optimizer, read.dtype, read.autocast, read.master_weights) == ("sgd", "bfloat16", None, False)
    made = scope["training_arguments"](output_dir="out", use_cpu=True, gradient_accumulation_steps=3)
    assert (made.optim, made.bf16, made.gradient_accumulation_steps) == ("sgd", False, 3)


def test_accelerate_and_deepspeed() -> None:
    made = export("accelerate", exploration(FULL, **SHARDED))
    assert yaml.safe_load(made.text) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_processes": 8,
        "mixed_precision": "bf16",
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


def test_deepspeed_overlaps_what_the_figures_overlap_and_says_what_it_cannot() -> None:
    """By default it reduces while backward goes on with ZeRO-3 alone; a bucket has 5e8 gradients of two bytes."""
    zero: dict[str, dict[str, Any]] = {}
    notes: dict[str, str] = {}
    for level in ("none", "zero1", "zero2", "zero3"):
        made = export("deepspeed", exploration(num_devices=8, training={"sharding": level}))
        zero[level], notes[level] = json.loads(made.text)["zero_optimization"], "\n".join(made.header)
    assert zero["none"] == {"stage": 0} and "reduces gradients when backward has ended" in notes["none"]
    assert zero["zero1"] == {"stage": 1, "overlap_comm": True}
    assert zero["zero2"] == {"stage": 2, "overlap_comm": True}
    assert "(2 x 500,000,000) take 1.9 GiB" in notes["zero2"] and "gathers parameters after" in notes["zero2"]
    assert "(1 x 500,000,000) take 0.9 GiB" in notes["zero3"] and "gathers parameters after" not in notes["zero3"]
    alone = export("deepspeed", exploration())
    assert not any(line.startswith("communication") for line in alone.header)


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


def test_megatron_says_that_it_keeps_gradients_in_float32() -> None:
    asked: dict[str, Any] = {"num_devices": 8, "training": {"optimizer": {"grad_dtype": "float32"}}}
    lines = [
        [line for line in export("megatron", exploration(**each)).header if "float32" in line]
        for each in (dict[str, Any](), asked)
    ]
    assert len(lines[0]) == 1 and "measured in bfloat16" in lines[0][0]
    assert lines[1] == []


def test_torchtitan_counts_sequences_in_a_release_and_tokens_on_the_main_line() -> None:
    answer = exploration(FULL, **SHARDED)
    release = flags(export("torchtitan", answer), "TORCHTITAN_FLAGS")
    main = flags(export("torchtitan-main", answer), "TORCHTITAN_FLAGS")
    assert release[:4] == ["--training.local_batch_size", "8", "--training.global_batch_size", "512"]
    assert main[:4] == [
        "--training.num_tokens_per_microbatch_per_dp_rank",
        str(8 * 4096),
        "--training.num_tokens_per_train_step",
        str(512 * 4096),
    ]
    assert release[4:] == main[4:]
    assert release[-1] == "activation_checkpoint:full"
    assert shlex.join(["--parallelism.fsdp_reshard_after_forward", "always"]) in shlex.join(release)
    assert "--compile.no-enable" in release


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        (Recompute.NONE, ""),
        (Recompute.SELECTIVE, "--recompute-granularity selective --recompute-modules core_attn"),
        (Recompute.PARTIAL_25, "--recompute-granularity full --recompute-method block --recompute-num-layers 4"),
        (Recompute.FULL, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (Recompute("layers_5"), "--recompute-granularity full --recompute-method block --recompute-num-layers 5"),
        (Recompute("groups_4"), "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4"),
    ],
)
def test_megatron_recomputes_by_its_own_flags(recompute: Recompute, expected: str) -> None:
    found = shlex.join(flags(export("megatron", exploration(candidate(recompute=recompute))), "MEGATRON_FLAGS"))
    assert found.startswith("--micro-batch-size 8 --global-batch-size 512 ")
    assert "--moe-grouped-gemm --bf16" in found
    assert expected in found
    assert ("--recompute" in found) is bool(expected)


@pytest.mark.parametrize(
    ("recompute", "every"), [("layers_3", 4), ("layers_5", 2), ("layers_9", None), ("groups_4", None)]
)
def test_a_number_of_layers_becomes_a_policy_that_recomputes_as_many(recompute: str, every: int | None) -> None:
    found = export("transformers", exploration(candidate(recompute=Recompute(recompute))))
    header = "\n".join(found.header)
    assert f"cannot be told the recomputation policy '{recompute}'" in header
    assert f"is used in place of '{recompute}'" in header
    document = json.loads(found.text)
    assert document["activation_checkpointing"]
    assert document["activation_checkpointing_kwargs"].get("every_n_layers") == every


def test_lightning_recomputes_the_first_layers() -> None:
    code = export("lightning", exploration(candidate(recompute=Recompute("layers_3")))).text
    assert "Recompute the first 3 of" in code
    assert "index = i\n" in code
    spread = export("lightning", exploration(candidate(recompute=Recompute.PARTIAL_25))).text
    assert "index = i * len(layers) // count" in spread


def test_lightning_has_functions_for_what_was_chosen_only() -> None:
    best = candidate(attention_backend="sdpa:cudnn", recompute=Recompute.PARTIAL_25, execution="compile")
    answer = exploration(best, execution=["eager", "compile"], allocator="expandable_segments", **SHARDED)
    code = export("lightning", answer).text
    functions = [node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    assert functions == ["make_trainer", "recompute", "compile_layers", "attention"]
    assert "accumulate_grad_batches=8," in code
    assert 'FSDPStrategy(sharding_strategy="FULL_SHARD")' in code
    assert "SDPBackend.CUDNN_ATTENTION" in code
    assert "count = 4\n" in code
    assert code.index('PYTORCH_ALLOC_CONF"] =') < code.index("import lightning")
    plain = ast.parse(export("lightning", exploration()).text)
    assert [node.name for node in plain.body if isinstance(node, ast.FunctionDef)] == ["make_trainer"]


def test_axolotl_and_llamafactory() -> None:
    chunked = candidate(recompute=Recompute.FULL, loss="chunked")
    assert yaml.safe_load(export("axolotl", exploration(chunked, losses=["library", "chunked"])).text) == {
        "micro_batch_size": 8,
        "gradient_accumulation_steps": 64,
        "bf16": True,
        "torch_compile": False,
        "gradient_checkpointing": True,
        "attn_implementation": "sdpa",
        "experts_implementation": "grouped_mm",
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "chunked_cross_entropy": True,
    }
    assert yaml.safe_load(export("llamafactory", exploration()).text) == {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 64,
        "disable_gradient_checkpointing": True,
        "use_reentrant_gc": False,
        "bf16": True,
        "flash_attn": "sdpa",
    }


@pytest.mark.parametrize("tile", [None, 2])
def test_a_cerebras_export_is_read_back_as_what_was_asked(tile: int | None) -> None:
    document = yaml.safe_load(export("cerebras", exploration(candidate(bta_tile=tile), num_devices=2)).text)
    document["trainer"]["init"]["model"] = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "filter_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 32,
    }
    request = parse_request(document)
    assert isinstance(request, ExplorationRequest)
    assert (request.micro_batch_size, request.batch_size, request.num_devices) == (8, 512, 2)
    assert (request.bta.enable, request.bta.max_tile) == (tile is not None, tile)


def test_the_python_module_hands_the_candidate_to_apply(tmp_path: Path) -> None:
    import bexp

    code = export("python", exploration(OURS, losses=["library", "chunked"], allocator="expandable_segments")).text
    scope: dict[str, Any] = {}
    setting, rest = code.split("import json", 1)
    assert setting.endswith('os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"\n\n')
    exec(f"import json{rest}", scope)  # without the setting, which is this process's as well
    read = bexp.RecommendedSetup.read(scope["RECOMMENDATION"])
    assert read.settings == bexp.Settings(
        attention="sdpa:flash",
        experts="bexp_fused",
        recompute="activations",
        loss="chunked",
        allocator="expandable_segments",
    )
    assert (read.micro_batch_size, read.grad_accum_steps(1), read.seq_length) == (8, 64, 4096)
    assert read.architecture["num_experts"] == 64
    arguments = scope["training_arguments"](output_dir=str(tmp_path), bf16=False, use_cpu=True)
    assert arguments.gradient_accumulation_steps == 64
