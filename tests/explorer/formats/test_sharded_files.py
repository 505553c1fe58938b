"""Files that shard by FSDP, DeepSpeed or `accelerate launch` become requests that train as they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.formats.refusals import refusal
from tests.explorer.formats.trainer_files import (
    AXOLOTL_FSDP,
    AXOLOTL_QLORA,
    CONFIG,
    FSDP2_LAUNCH,
    LLAMAFACTORY,
    LLAMAFACTORY_ZERO3,
    TRL_FULL,
    ZERO3,
    beside_its_model,
)

TRAINERS = {
    "axolotl": AXOLOTL_FSDP.replace("fsdp_version", "# fsdp_version").replace("fsdp_config:", "kept_config:"),
    "llamafactory": LLAMAFACTORY_ZERO3.replace("deepspeed:", "# deepspeed:"),
    "trl": TRL_FULL,
}
"""Files that shard nothing, of all weights."""
UNREAD = {"kept_config": None}


def document(trainer: str, launch: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return what a command makes of a file of all weights with `changes`, or of TrainingArguments."""
    if trainer == "arguments":
        made: dict[str, Any] = {
            **CONFIG,
            "training_arguments": {
                **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "bf16": True},
                **changes,
            },
        }
    else:
        made = beside_its_model(trainer, TRAINERS[trainer], **UNREAD, **changes)
    return made if launch is None else {**made, "accelerate": launch}


def read(trainer: str, num_devices: int | None = 2, *, launch: Any = None, **changes: Any) -> ExplorationRequest:
    overrides = {} if num_devices is None else {"num_devices": num_devices}
    return parse_request(document(trainer, launch, **changes), overrides=overrides)


EVERY = (*TRAINERS, "arguments")
WITH_SWITCH = tuple(trainer for trainer in EVERY if trainer != "axolotl")
"""Those that shard by `fsdp`, and have FSDP1 as well."""
STEPS = {"axolotl": 4, "llamafactory": 4, "trl": 16, "arguments": 4}
"""Sequences of a device's step."""


@pytest.mark.parametrize("trainer", WITH_SWITCH)
@pytest.mark.parametrize(
    ("switch", "config", "level"),
    [
        (True, {"version": 2, "reshard_after_forward": True}, "zero3"),
        (True, {"reshard_after_forward": "false", "fsdp_version": "2"}, "zero2"),
        ("full_shard auto_wrap", {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}, "zero3"),
        (["shard_grad_op", "auto_wrap"], {"version": 2}, "zero2"),
        ("shard_grad_op", {"version": "2", "fsdp_version": 2, "reshard_after_forward": True}, "zero3"),
        ("full_shard", {"fsdp_sharding_strategy": "1", "fsdp_backward_prefetch": "BACKWARD_PRE"}, "zero3"),
        (True, {"version": 1, "state_dict_type": "LOCAL_STATE_DICT", "backward_prefetch": "backward_post"}, "zero3"),
    ],
)
def test_fsdp_is_read_alike_for_all_trainers(trainer: str, switch: Any, config: Any, level: str) -> None:
    asked = read(trainer, fsdp=switch, fsdp_config=config)
    assert (asked.training.sharding, asked.num_devices, asked.batch_size) == (level, 2, 2 * STEPS[trainer])
    assert not any("not read" in notice for notice in asked.notices)


@pytest.mark.parametrize(
    ("trainer", "changes", "precision"),
    [
        ("axolotl", {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}, "pure"),
        ("axolotl", {"fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}, "pure"),
        ("axolotl", {"fsdp_config": {"version": 2}}, "pure"),
        ("trl", {"fsdp": True}, "master"),
        ("trl", {"fsdp": True, "dtype": "bfloat16"}, "master"),
        ("trl", {"fsdp": True, "dtype": "bfloat16", "bf16": False}, "pure"),
        ("llamafactory", {"fsdp": True}, "master"),
        ("llamafactory", {"fsdp": True, "bf16": None, "pure_bf16": True}, "pure"),
        ("arguments", {"fsdp": True}, "master"),
        *((trainer, {"deepspeed": ZERO3}, "master") for trainer in EVERY),
    ],
)
def test_weights_are_measured_in_the_formats_of_the_trainer(
    trainer: str, changes: dict[str, Any], precision: str
) -> None:
    assert read(trainer, **changes).training.precision == precision


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("trainer", EVERY)
def test_stages_of_deepspeed_are_read_alike_for_all_trainers(trainer: str, stage: int) -> None:
    json = {**ZERO3, "zero_optimization": {**ZERO3["zero_optimization"], "stage": stage}}
    asked = read(trainer, deepspeed=json)
    assert (asked.training.sharding.level, asked.batch_size) == (stage, 2 * STEPS[trainer])
    assert asked.kept["deepspeed"]["zero_optimization"]["reduce_bucket_size"] == "auto", "it is kept for an export"


def test_deepspeed_on_one_device_keeps_master_weights() -> None:
    for trainer in EVERY:
        asked = read(trainer, None, deepspeed=ZERO3)
        assert (asked.training.sharding, asked.training.precision, asked.num_devices) == ("none", "master", 1)
        assert any("shards nothing on one device" in notice for notice in asked.notices)


@pytest.mark.parametrize("trainer", EVERY)
def test_a_configuration_of_accelerate_launch_stands_next_to_any_file(trainer: str) -> None:
    asked = read(trainer, None, launch=FSDP2_LAUNCH)
    assert (asked.num_devices, asked.batch_size) == (4, 4 * STEPS[trainer])
    assert (asked.training.sharding, asked.training.precision) == (
        "zero3",
        "pure" if trainer == "axolotl" else "master",
    )
    assert read(trainer, 2, launch=FSDP2_LAUNCH).batch_size == 2 * STEPS[trainer], "an option counts before the file"
    zero = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}, "num_processes": 2}
    asked = read(trainer, None, launch={**zero, "mixed_precision": "bf16"})
    assert (asked.training.sharding, asked.training.precision, asked.num_devices) == ("zero2", "master", 2)
    nested = {"deepspeed_config_file": ZERO3, "zero3_init_flag": True}
    assert read(trainer, None, launch={**zero, "deepspeed_config": nested}).training.sharding == "zero3"
    plain = read(trainer, None, launch={"distributed_type": "MULTI_GPU", "num_processes": 8})
    assert (plain.training.sharding, plain.num_devices) == ("none", 8)
    assert read(trainer, None, launch={"distributed_type": "NO", "num_processes": 8}).num_devices == 1


def test_axolotl_is_launched_with_the_second_version_of_fsdp() -> None:
    first = {**FSDP2_LAUNCH, "fsdp_config": {"fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    assert "must have fsdp_version: 2" in str(refusal(document("axolotl", first)))
    assert read("trl", None, launch=first).training.precision == "master"


def test_a_launcher_decides_the_products_of_a_file_that_does_not() -> None:
    changes: dict[str, Any] = {"bf16": None}
    assert "say bf16: true" in str(refusal(document("llamafactory", **changes)))
    assert read("llamafactory", None, launch=FSDP2_LAUNCH, **changes).training.precision == "master"
    alone = {key: value for key, value in document("arguments", **changes).items() if key != "training_arguments"}
    asked = parse_request({**alone, "accelerate": FSDP2_LAUNCH, "batch_size": 64})
    assert (asked.training.precision, asked.num_devices, asked.batch_size) == ("master", 4, 64)


def test_trl_names_its_own_configurations_of_the_launcher() -> None:
    asked = read("trl", None, accelerate_config="zero2", num_processes=2)
    assert (asked.training.sharding, asked.num_devices, asked.batch_size) == ("zero2", 2, 32)
    assert read("trl", None, accelerate_config="fsdp2").num_devices == 8
    assert read("trl", None, accelerate_config=FSDP2_LAUNCH).num_devices == 4
    assert "TRL has none of this name" in str(refusal(document("trl", accelerate_config="zero4")))
    twice = refusal(document("trl", FSDP2_LAUNCH, accelerate_config="zero2"))
    assert "given a second time" in twice["trl", "accelerate_config"]


def test_adapters_are_sharded_in_float32_over_weights_in_half_precision() -> None:
    for trainer, text in (("axolotl", AXOLOTL_QLORA.replace("load_in_4bit: true", "")), ("llamafactory", LLAMAFACTORY)):
        adapters: dict[str, Any] = {"adapter": "lora", "optimizer": "adamw_torch"} if trainer == "axolotl" else {}
        switch = {} if trainer == "axolotl" else {"fsdp": ["full_shard"]}
        for sharded in ({"deepspeed": ZERO3}, {**switch, "fsdp_config": {"version": 2}}):
            asked = parse_request(beside_its_model(trainer, text, **adapters, **sharded), overrides={"num_devices": 2})
            assert asked.training.lora is not None
            assert (asked.training.sharding, asked.training.precision) == ("zero3", "pure"), trainer


def test_recomputation_of_fsdp_is_the_base() -> None:
    for trainer in EVERY:
        checkpointing: dict[str, Any] = {"trl": {"gradient_checkpointing": False}}.get(trainer, {})
        checkpointing |= {"disable_gradient_checkpointing": True} if trainer == "llamafactory" else {}
        for value in (True, False):
            switch: dict[str, Any] = {} if trainer == "axolotl" else {"fsdp": ["full_shard"]}
            config = {"activation_checkpointing": value}
            asked = read(trainer, fsdp_config=config, **switch, **checkpointing)
            assert asked.base_recompute == ("full" if value else None), trainer


OFFLOADED = {"stage": 3, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"fsdp": "full_shard offload"}, "fsdp", "leave offload out"),
        ({"fsdp": "hybrid_shard"}, "fsdp", "hybrid_shard: hierarchical sharding"),
        ({"fsdp": "half_shard"}, "fsdp", "half_shard is not supported"),
        *(
            ({"fsdp": True, "fsdp_config": {"version": version, key: value}}, f"fsdp_config.{key}", words)
            for version, key, value, words in (
                (1, "reshard_after_forward", True, "FSDP1 takes no truth value"),
                (1, "fsdp_reshard_after_forward", "false", "FSDP1 takes no truth value"),
                (2, "reshard_after_forward", "SHARD_GRAD_OP", "FSDP2 takes true or false"),
                (2, "reshard_after_forward", 2, "FSDP2 takes true or false"),
                (2, "state_dict_type", "LOCAL_STATE_DICT", "say SHARDED_STATE_DICT"),
                (2, "state_dict_type", "2", "say SHARDED_STATE_DICT"),
                (1, "state_dict_type", "SHARDED", "say SHARDED_STATE_DICT"),
                (1, "backward_prefetch", "BEFORE", "must be one of NO_PREFETCH, BACKWARD_PRE, BACKWARD_POST"),
                (2, "activation_checkpointing", "on", "must be true or false"),
                (1, "use_orig_params", 1, "must be true or false"),
                (2, "auto_wrap_policy", "transformer_based_wrap", "say TRANSFORMER_BASED_WRAP"),
                (2, "fsdp_version", 1, "is another value of version"),
            )
        ),
        *(
            ({"fsdp": word, "fsdp_config": {"version": 2}}, "fsdp", "say full_shard or shard_grad_op")
            for word in ("no_shard", "SHARD_GRAD_OP")
        ),
        (
            {"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": True, "reshard_after_forward": "false"}},
            "fsdp_config.reshard_after_forward",
            "is another value of fsdp_reshard_after_forward: keep one of them",
        ),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, "fsdp_config.cpu_offload", "bexp tune -- COMMAND"),
        ({"fsdp": True, "fsdp_config": {"fsdp_offload_params": "true"}}, "fsdp_config.fsdp_offload_params", "host"),
        (
            {"fsdp": True, "fsdp_config": {"sharding_strategy": 5}},
            "fsdp_config.sharding_strategy",
            "hybrid_shard_zero2",
        ),
        (
            {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}},
            "fsdp_config.auto_wrap_policy",
            "decoder layer",
        ),
        ({"fsdp": True, "fsdp_config": {"version": 3}}, "fsdp_config.version", "must be 1 or 2"),
        ({"fsdp": True, "fsdp_config": {"ignored_modules": "lm_head"}}, "fsdp_config.ignored_modules", "remove it"),
        ({"fsdp": True, "fsdp_config": "fsdp.json"}, "fsdp_config", "put its content here"),
        ({"fsdp": True, "fsdp_config": ["version: 2"]}, "fsdp_config", "mapping"),
        ({"deepspeed": {"zero_optimization": OFFLOADED}}, "deepspeed.zero_optimization.offload_param", "device: none"),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}}, "", "ZeRO++: hierarchical"),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "mics_shard_size": 8}}}, "", "MiCS: hierarchical"),
        ({"deepspeed": {"zero_optimization": {"zero_quantized_gradients": True}}}, "", "ZeRO++"),
        (
            {"deepspeed": {**ZERO3, "gradient_accumulation_steps": 3}},
            "deepspeed.gradient_accumulation_steps",
            "say auto",
        ),
    ],
)
@pytest.mark.parametrize("trainer", WITH_SWITCH)
def test_what_is_not_measured_is_refused_at_its_key(
    trainer: str, changes: dict[str, Any], key: str, words: str
) -> None:
    errors = refusal(document(trainer, **changes), num_devices=2)
    first = "training_arguments" if trainer == "arguments" else trainer
    found = {".".join(map(str, where)): message for where, message in errors.items()}
    assert any(words in message and where.startswith(f"{first}.{key}") for where, message in found.items()), found


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"num_machines": 2}, "num_machines", "say 1, with the num_processes of one machine"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type", "is not measured; these are"),
        ({"mixed_precision": "fp8"}, "mixed_precision", "say bf16"),
        ({"fsdp_config": {"fsdp_offload_params": True}}, "fsdp_config.fsdp_offload_params", "host"),
        ({"parallelism_config": {"parallelism_config_cp_size": 2}}, "parallelism_config", "share a sequence"),
        ({"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}, "parallelism_config", "hierarchical"),
        ({"an_invention": 1}, "an_invention", "not a known field"),
        *(
            ({"fsdp_config": {**FSDP2_LAUNCH["fsdp_config"], key: value}}, f"fsdp_config.{key}", words)
            for key, value, words in (
                ("reshard_after_forward", False, "is another value of fsdp_reshard_after_forward"),
                ("fsdp_reshard_after_forward", "FULL_SHARD", "FSDP2 takes true or false"),
                ("fsdp_state_dict_type", "LOCAL_STATE_DICT", "say SHARDED_STATE_DICT"),
                ("fsdp_sync_module_states", False, "fsdp_cpu_ram_efficient_loading: false"),
                ("fsdp_auto_wrap_policy", None, "one decoder layer at a time"),
            )
        ),
        ({"dynamo_config": {"dynamo_backend": "no", "backend": "inductor"}}, "dynamo_config.backend", "keep one of"),
        ({"dynamo_backend": "INDUCTOR", "dynamo_config": {"backend": "NO"}}, "dynamo_backend", "keep one of them"),
        ({"dynamo_config": {"backend": "INDUCTOR", "an_invention": 1}}, "dynamo_config.an_invention", "not a known"),
        ({"dynamo_config": {"dynamo_backend": "TENSORRT"}}, "dynamo_config", "inductor alone"),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}},
            "dynamo_config.dynamo_mode",
            "say default",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_optimizer_device": "cpu"}},
            "deepspeed_config.offload_optimizer_device",
            "say none, or measure it in your own command",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "zero.json"}},
            "deepspeed_config.deepspeed_config_file",
            "put its content here",
        ),
    ],
)
def test_what_a_launcher_has_that_is_not_measured_is_refused(changes: dict[str, Any], key: str, words: str) -> None:
    for trainer in ("trl", "arguments"):
        errors = refusal(document(trainer, {**FSDP2_LAUNCH, **changes}))
        found = {".".join(map(str, where)): message for where, message in errors.items()}
        assert any(words in message and where.startswith(f"accelerate.{key}") for where, message in found.items()), (
            found
        )


def test_two_ways_to_shard_and_files_that_are_not_read_are_refused() -> None:
    assert "keep one of them" in str(refusal(document("trl", fsdp=True, deepspeed=ZERO3), num_devices=2))
    assert "keep one of them" in str(refusal(document("trl", FSDP2_LAUNCH, deepspeed=ZERO3)))
    errors = refusal({**document("trl"), "deepspeed": ZERO3})
    assert "put it into that file" in errors["deepspeed",]
    with pytest.raises(FormatError, match="say adamw_torch_fused, or measure it in your own command"):
        read("trl", fsdp=True, optim="adamw_bnb_8bit")


ZERO3_LAUNCH = {
    **{"distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": "bf16"},
    "deepspeed_config": {"zero_stage": 3},
}


@pytest.mark.parametrize("launch", [FSDP2_LAUNCH, ZERO3_LAUNCH])
@pytest.mark.parametrize("own", [{"fsdp": ["shard_grad_op"], "fsdp_config": {"version": 2}}, {"deepspeed": ZERO3}])
@pytest.mark.parametrize("trainer", EVERY)
def test_neither_a_file_nor_its_launcher_counts_where_both_shard(
    trainer: str, own: dict[str, Any], launch: dict[str, Any]
) -> None:
    errors = refusal(document(trainer, launch, **own))
    assert any("keep one of them" in message for message in errors.values()), errors


@pytest.mark.parametrize(
    ("config", "level", "changes_nothing"),
    [
        ({"version": 1, "sharding_strategy": 2, "reshard_after_forward": True}, "zero2", "reshard_after_forward"),
        ({"version": 1, "sharding_strategy": "no_shard"}, "none", None),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, "zero3", "reshard_after_forward"),
        ({"version": 2, "sharding_strategy": "SHARD_GRAD_OP"}, "zero3", "sharding_strategy"),
        ({"version": 2, "reshard_after_forward": False, "sharding_strategy": "SHARD_GRAD_OP"}, "zero2", None),
    ],
)
def test_what_accelerate_does_not_read_is_named(
    config: dict[str, Any], level: str, changes_nothing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = pytest.importorskip("accelerate")
    named = {f"fsdp_{key}": value for key, value in config.items()} | {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"
    }
    asked = read("arguments", None, launch={**FSDP2_LAUNCH, "fsdp_config": named})
    assert asked.training.sharding == level
    noted = [notice for notice in asked.notices if "changes nothing in FSDP" in notice]
    assert [f"fsdp_{changes_nothing}" in notice for notice in noted] == [True] * (changes_nothing is not None)
    for key, value in {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": "true", **config}.items():
        monkeypatch.setenv(f"FSDP_{key}".upper(), str(value).lower())  # as accelerate launch sets them
    plugin = accelerate.FullyShardedDataParallelPlugin()
    read_by_it = plugin.sharding_strategy or plugin.reshard_after_forward
    levels = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "none", True: "zero3", False: "zero2"}
    assert levels[getattr(read_by_it, "name", read_by_it)] == level


@pytest.mark.parametrize("trainer", WITH_SWITCH)
@pytest.mark.parametrize(("switch", "config"), [("shard_grad_op", {}), (True, {"reshard_after_forward": "NO_SHARD"})])
def test_version_1_without_a_launcher_shards_all_whatever_is_said(
    trainer: str, switch: Any, config: dict[str, Any]
) -> None:
    asked = read(trainer, fsdp=switch, fsdp_config={**config, "version": 1})
    assert asked.training.sharding == "zero3"
    assert any("changes nothing in FSDP1, which is measured as full_shard" in notice for notice in asked.notices)


@pytest.mark.parametrize(
    "keys", [{"dynamo_backend": "INDUCTOR"}, {"backend": "INDUCTOR", "dynamo_backend": "inductor"}]
)
def test_a_compiler_that_is_named_alike_twice_is_read(keys: dict[str, str]) -> None:
    launch = {**FSDP2_LAUNCH, "dynamo_backend": "inductor", "dynamo_config": keys}
    assert read("arguments", None, launch=launch).execution == "compile"


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"fsdp_version": 2, "fsdp_config": {"fsdp_version": 1}}, "fsdp_config.fsdp_version", "is another value of"),
        ({"fsdp_config": {"version": 1}}, "fsdp_config.version", "must be 2"),
        ({"fsdp_version": 1, "fsdp_config": {}}, "fsdp_version", "these are: 2"),
        ({"fsdp": ["full_shard"]}, "fsdp", "shards by fsdp_config alone"),
        *(
            ({"fsdp_config": {key: value}}, f"fsdp_config.{key}", "of FSDP1 alone")
            for key, value in (("fsdp_sharding_strategy", "FULL_SHARD"), ("forward_prefetch", False))
        ),
        ({"fsdp_config": {"offload_params": True}}, "fsdp_config.offload_params", "host"),
        ({"deepspeed": {**ZERO3, "train_batch_size": 9}}, "deepspeed.train_batch_size", "must be 8"),
        *(
            ({"deepspeed": {**ZERO3, "bf16": {"enabled": True, key: True}}}, f"deepspeed.bf16.{key}", "formats")
            for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states")
        ),
        *(
            (
                {"deepspeed": {**ZERO3, "data_types": {"grad_accum_dtype": name}}},
                "deepspeed.data_types.grad_accum_dtype",
                "format of the weights",
            )
            for name in ("fp32", "torch.float32")
        ),
        ({"torch_compile": "auto"}, "torch_compile", "execution 'compile'"),
        ({"full_determinism": True}, "full_determinism", "slower"),
        ({"torch_empty_cache_steps": 4}, "torch_empty_cache_steps", "slower"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config", "number of processes"),
        ({"accelerator_config": '{"split_batches": true}'}, "accelerator_config", "number of processes"),
        ({"accelerator_config": ["split_batches"]}, "accelerator_config", "must be a mapping"),
    ],
)
def test_what_axolotl_does_otherwise_is_refused(changes: dict[str, Any], key: str, words: str) -> None:
    errors = refusal(document("axolotl", **changes), num_devices=2)
    found = {".".join(map(str, where)): message for where, message in errors.items()}
    assert words in found[f"axolotl.{key}"]


def test_keys_that_change_nothing_of_a_batch_or_a_format_are_read() -> None:
    for accumulated in ({"grad_accum_dtype": "bf16"}, {"grad_accum_dtype": None}, {}):
        asked = read("axolotl", deepspeed={**ZERO3, "data_types": accumulated})
        assert (asked.training.precision, asked.kept["deepspeed"]["data_types"]) == ("master", accumulated)
    summed = {**ZERO3, "zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert read("axolotl", deepspeed=summed).training.sharding == "none", "it is the default of that stage"
    off = {**ZERO3, "fp16": {"enabled": False, "fp16_master_weights_and_grads": True}}
    assert read("axolotl", deepspeed=off).training.precision == "master"
    kept = {"even_batches": False, "gradient_accumulation_kwargs": {"sync_each_batch": True, "num_steps": 1}}
    for trainer in EVERY:
        assert not any("not read" in notice for notice in read(trainer, accelerator_config=kept).notices)


def test_two_engines_of_training_arguments_are_refused() -> None:
    errors = refusal(document("arguments", fsdp=True, deepspeed=ZERO3), num_devices=2)
    assert "shards as training_arguments.fsdp does" in errors["training_arguments", "deepspeed"]
    beside = {**document("arguments", fsdp=True), "deepspeed": ZERO3}
    assert "keep one of them" in str(refusal(beside, num_devices=2))


def test_keys_of_fsdp_without_its_switch_shard_nothing() -> None:
    config = {"version": 2, "reshard_after_forward": True}
    asked = read("trl", fsdp_config=config)
    assert asked.training.sharding == "none"
    assert any("fsdp_config does nothing without fsdp: true" in notice for notice in asked.notices)
    assert read("axolotl", fsdp_config=config).training.sharding == "zero3", "Axolotl has no other switch"


def test_what_runs_otherwise_than_it_is_measured_is_noted() -> None:
    hidden = {**ZERO3, "zero_optimization": {"stage": 2}}
    assert any("overlap_comm: true" in notice for notice in read("trl", deepspeed=hidden).notices)
    assert not any("overlap_comm" in notice for notice in read("trl", deepspeed=ZERO3).notices)
    stated = {**ZERO3, "train_micro_batch_size_per_gpu": 4}
    assert any(
        "say auto, because the answer may be another" in notice for notice in read("trl", deepspeed=stated).notices
    )
    assert any(
        "FSDP1 is measured as FSDP2" in notice for notice in read("trl", fsdp=True, fsdp_config={"version": 1}).notices
    )
    packed = read("axolotl", fsdp_version=2, fsdp_config={"version": 2}, sample_packing=True)
    assert packed.lengths is None
    assert any("packed rows are measured full" in notice for notice in packed.notices)
