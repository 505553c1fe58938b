"""A trainer's own file becomes a request that trains as the file says."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.formats.training_files import base_model, find_trainer
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.trainers.registry import FILES as TRAINER_FILES
from tests.explorer.formats.trainer_files import FILES, beside_its_model


def read(name: str, overrides: dict[str, Any] | None = None, **changes: Any) -> ExplorationRequest:
    return parse_request(beside_its_model(*FILES[name], **changes), overrides=overrides)


def refusal(name: str, **changes: Any) -> dict[str, str]:
    with pytest.raises(FormatError) as caught:
        read(name, **changes)
    return {".".join(map(str, location)): reason for location, reason in caught.value.errors}


@pytest.mark.parametrize(
    ("name", "length", "batch", "base", "optimizer", "precision", "quantization", "batching"),
    [
        ("axolotl", 4096, 16, 2, "adamw", "upcast", None, "packed"),
        ("axolotl, QLoRA", 2048, 16, 4, "adamw_bnb_8bit", "pure", "bnb_4bit", None),
        ("llamafactory", 2048, 8, 1, "adamw", "pure", None, None),
        ("llamafactory, full", 4096, 8, 2, "adafactor", "pure", None, None),
        ("trl", 4096, 16, 2, "adamw", "pure", None, "packed"),
        ("trl, full", 2048, 16, 4, "adamw", "autocast", None, None),
        ("torchtune", 2048, 32, 4, "adamw", "pure", None, None),
    ],
)
def test_what_decides_memory_is_read(
    name: str,
    length: int,
    batch: int,
    base: int,
    optimizer: str,
    precision: str,
    quantization: str | None,
    batching: str | None,
) -> None:
    asked, training = read(name), read(name).training
    assert (asked.trainer, asked.target_name, asked.seq_length) == (FILES[name][0], "transformers", length)
    assert (asked.batch_size, asked.base_micro_batch_size, asked.micro_batch_choice) == (batch, base, "auto")
    assert (training.optimizer.name, training.precision, asked.quantization) == (optimizer, precision, quantization)
    assert asked.hf_config is not None
    assert (asked.batching, asked.recompute, asked.hf_config["dtype"]) == (batching, None, "bfloat16")
    assert not any("not read" in notice or "ignored" in notice for notice in asked.notices)


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("axolotl", None),
        (
            "axolotl, QLoRA",
            {
                **{"r": 32, "alpha": 16.0, "dropout": 0.05, "use_rslora": True},
                **{"target_modules": ("q_proj", "v_proj", "down_proj"), "modules_to_save": ("embed_tokens",)},
            },
        ),
        ("llamafactory", {"r": 8, "alpha": 16.0, "target_modules": "linear-modules"}),  # its default is twice the rank
        ("llamafactory, full", None),
        ("trl", {"r": 16, "alpha": 32.0, "target_modules": "all-linear", "use_dora": True}),
        ("trl, full", None),
        (
            "torchtune",
            {
                **{"r": 64, "alpha": 128.0},
                "target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            },
        ),
    ],
)
def test_adapters_are_read(name: str, lora: dict[str, Any] | None) -> None:
    found = read(name).training.lora
    assert (None if found is None else found.model_dump(exclude_defaults=True)) == lora


def test_each_trainer_lists_linear_layers_as_it_does() -> None:
    """TRL hands `all-linear` to peft; Axolotl and LLaMA-Factory list linear layers by their class."""
    for name, key, value, modules in (
        ("axolotl, QLoRA", "lora_target_linear", True, "linear-modules"),
        ("axolotl, QLoRA", "lora_target_modules", "all-linear", "all-linear"),
        ("llamafactory", "lora_target", ["all"], "linear-modules"),
        ("llamafactory", "lora_target", "q_proj", ("q_proj",)),
        ("trl", "lora_target_modules", ["all-linear"], "all-linear"),
    ):
        changes: dict[str, Any] = {"lora_target_modules": None} if name == "axolotl, QLoRA" else {}
        lora = read(name, **changes | {key: value}).training.lora
        assert lora is not None
        assert lora.target_modules == modules, (name, value)


def test_other_spellings_of_adapters() -> None:
    experts = ["experts.gate_up_proj"]
    asked = read("axolotl, QLoRA", lora_target_parameters=experts, lora_target_modules=None, lora_target_linear=True)
    assert asked.training.lora is not None
    assert (asked.training.lora.target_modules, asked.training.lora.target_parameters) == (
        "linear-modules",
        tuple(experts),
    )
    asked = read("llamafactory", lora_target="q_proj, v_proj", additional_target="lm_head", quantization_bit=8)
    assert asked.training.lora is not None
    assert (asked.training.lora.target_modules, asked.training.lora.modules_to_save) == (
        ("q_proj", "v_proj"),
        ("lm_head",),
    )
    assert asked.quantization == "bnb_8bit"
    assert read("trl", use_peft=False).training.lora is None


@pytest.mark.parametrize(
    ("name", "changes", "dtype", "precision"),
    [
        ("llamafactory, full", {"pure_bf16": False, "bf16": True}, "bfloat16", "autocast"),
        ("trl, full", {"dtype": "bfloat16", "bf16": False}, "bfloat16", "pure"),
        ("trl, full", {"dtype": "auto"}, "bfloat16", "pure"),  # as the checkpoint has it
        ("trl, full", {"dtype": "float32", "bf16": True}, "bfloat16", "autocast"),
        ("trl", {"dtype": "float32"}, "bfloat16", "autocast"),
        ("torchtune", {"dtype": "fp32"}, "bfloat16", "pure"),
        ("axolotl, QLoRA", {"bf16": False, "load_in_4bit": None, "adapter": "lora"}, "bfloat16", "pure"),
    ],
)
def test_number_formats(name: str, changes: dict[str, Any], dtype: str, precision: str) -> None:
    asked = read(name, **changes)
    assert asked.hf_config is not None
    assert (asked.hf_config["dtype"], asked.training.precision) == (dtype, precision)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("axolotl", {"bf16": False}, "bf16"),
        ("llamafactory, full", {"pure_bf16": None, "optim": "adamw_torch"}, "bf16"),
        ("trl, full", {"dtype": "float32", "bf16": False}, "bf16"),
    ],
)
def test_all_weights_in_float32_alone_are_not_measured(name: str, changes: dict[str, Any], key: str) -> None:
    assert f"say {key}: true" in refusal(name, **changes)[f"{FILES[name][0]}.{key}"]
    assert read(name, **changes | {key: True}).training.precision in ("autocast", "upcast")  # as the refusal says
    assert read(name, {"target": "bexp"}, **changes).shapes.dtype == "float32", "the reference layers have it"


def test_adapters_of_a_file_in_float32_are_said_to_be_measured_over_bfloat16() -> None:
    for name, changes in (("axolotl, QLoRA", {"load_in_4bit": None, "adapter": "lora"}), ("trl", {"dtype": "float32"})):
        asked = read(name, bf16=False, **changes)
        assert any("frozen weights are measured in bfloat16" in notice for notice in asked.notices)
        assert not any("frozen weights" in notice for notice in read(name, bf16=True, **changes).notices)


def test_the_base_recomputes_as_the_file_or_its_trainer_does() -> None:
    """By default LLaMA-Factory and TRL recompute every layer; Axolotl and torchtune do not."""
    for name, key, value, base in (
        ("llamafactory", "disable_gradient_checkpointing", None, "full"),
        ("llamafactory", "disable_gradient_checkpointing", True, None),
        ("trl", "gradient_checkpointing", None, "full"),
        ("trl", "gradient_checkpointing", False, None),
        ("axolotl", "gradient_checkpointing", None, None),
        ("axolotl", "gradient_checkpointing", True, "full"),
        ("torchtune", "enable_activation_checkpointing", False, None),
    ):
        changes: dict[str, Any] = {key: value}
        asked = read(name, **changes)
        assert asked.base_recompute == base, (name, value)
        assert any("with every layer recomputed" in notice for notice in asked.notices) == (base is not None)
        assert asked.recompute is None, "it is explored all the same"


def test_autocast_over_weights_in_bfloat16_is_said_to_be_left_out() -> None:
    notices = read("trl, full", dtype="bfloat16").notices
    assert "weights in bfloat16 are measured without autocast: the export says bf16: false" in notices


def test_lengths_of_texts_are_cut_into_batches_as_the_file_says() -> None:
    texts = {"lengths": "lognormal(300, 1.0)"}
    assert read("axolotl", texts).batching == "packed"
    assert read("axolotl, QLoRA", texts).batching == "grouped"
    assert read("llamafactory", texts).batching == "padded"
    assert read("llamafactory", texts, neat_packing=True).batching == "packed"
    assert read("trl", {**texts, "batching": "padded"}).batching == "padded"
    assert any("one text of 4096 tokens each" in notice for notice in read("axolotl").notices)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("llamafactory", {"packing": True}, "packing"),
        ("llamafactory", {"stage": "pt"}, "stage"),
        ("axolotl, QLoRA", {"pad_to_sequence_len": True}, "pad_to_sequence_len"),
    ],
)
def test_rows_that_are_full_whatever_the_lengths_are_not_measured_padded(
    name: str, changes: dict[str, Any], key: str
) -> None:
    texts = {"lengths": "lognormal(300, 1.0)"}
    with pytest.raises(FormatError, match=rf"{key}: fills every row, however long texts are: leave lengths out"):
        read(name, texts, **changes)
    assert read(name, **changes).batching is None
    assert read(name, {**texts, "batching": "padded"}, **changes).batching == "padded"
    assert read("llamafactory", texts, stage="pt", packing=False).batching == "padded"


def test_a_file_that_cuts_no_text_needs_a_length() -> None:
    for name, key in (("trl", "max_length"), ("torchtune", "tokenizer.max_seq_len")):
        change: dict[str, Any] = {key.replace(".", "__"): None}
        assert "say --seq-length" in refusal(name, **change)[f"{name}.{key}"]
        assert read(name, {"model.seq_length": 512}, **change).seq_length == 512


def test_another_trainer_beside_a_file_is_refused() -> None:
    for document, overrides in (({}, {"trainer": "trl"}), ({"trainer": "trl"}, {})):
        with pytest.raises(FormatError, match="is a file of axolotl, and the trainer that is named is trl"):
            parse_request(beside_its_model(*FILES["axolotl"]) | document, overrides=overrides)
    assert read("axolotl", {"trainer": "axolotl"}).trainer == "axolotl"


@pytest.mark.parametrize(
    ("name", "field", "value", "key"),
    [
        ("trl, full", "losses", ["liger"], "trl.loss_type"),
        ("torchtune", "execution", "eager", "torchtune.compile"),
        ("axolotl, QLoRA", "quantization", "bnb_8bit", "axolotl.load_in_4bit"),
    ],
)
def test_a_field_beside_a_file_that_contradicts_it_is_refused(name: str, field: str, value: Any, key: str) -> None:
    document = beside_its_model(*FILES[name])
    with pytest.raises(FormatError) as refused:
        parse_request(document | {field: value})
    reason = f"contradicts {field} outside the file, which is {value}: keep one"
    assert refused.value.errors == [(tuple(key.split(".")), reason)]
    stated = getattr(parse_request(document), field)
    assert getattr(parse_request(document | {field: stated}), field) == stated
    assert field == "losses" or getattr(parse_request(document, overrides={field: value}), field) == value


def test_options_replace_what_the_file_says_and_devices_multiply_the_batch() -> None:
    asked = read("trl, full", {"model.seq_length": 512, "training.optimizer.name": "sgd", "num_devices": 2})
    assert (asked.seq_length, asked.training.optimizer.name, asked.batch_size) == (512, "sgd", 32)
    assert read("axolotl, QLoRA", world_size=4).batch_size == 64
    alone = read("axolotl", gradient_accumulation_steps=None, batch_size=6)
    assert alone.batch_size == alone.base_micro_batch_size == 2, "Axolotl accumulates by gradient_accumulation_steps"
    assert any("batch_size: accumulates nothing" in notice for notice in alone.notices)
    assert read("torchtune", {"num_devices": 2}, compile=False).training.sharding is Sharding.ZERO3


@pytest.mark.parametrize(
    ("name", "changes", "field", "words"),
    [
        ("axolotl", {"deepspeed": "zero3.json"}, "deepspeed", "a file that was not found: put its content here"),
        ("axolotl, QLoRA", {"deepspeed": "zero3.json", "world_size": 2}, "deepspeed", "put its content here"),
        ("axolotl, QLoRA", {"deepspeed": ["zero3.json"]}, "deepspeed", "must be DeepSpeed's JSON, or its path"),
        (
            "axolotl, QLoRA",
            {"deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}},
            "deepspeed.zero_optimization.offload_optimizer",
            "what moves to the host's memory is not measured: say device: none, or measure it in your own command",
        ),
        ("trl", {"deepspeed": {"fp16": {"enabled": True}}}, "deepspeed.fp16.enabled", "contradicts the number formats"),
        ("axolotl", {"adapter": "llama-adapter"}, "adapter", "is not measured; these are: lora, qlora"),
        ("axolotl", {"optimizer": "dion"}, "optimizer", "any other optimizer is measured in your own command"),
        ("axolotl", {"gradient_checkpointing": "offload"}, "gradient_checkpointing", "host's memory"),
        ("axolotl, QLoRA", {"torch_compile": True}, "torch_compile", "Axolotl cannot express execution 'compile'"),
        ("axolotl", {"micro_batch_size": "auto"}, "micro_batch_size", "a whole number from 1 on"),
        ("axolotl", {"load_in_8bit": True}, "load_in_8bit", "add training.lora"),
        ("axolotl", {"attn_implementation": "sage", "flash_attention": None}, "attn_implementation", "not measured"),
        ("axolotl", {"attn_implementation": "sdpa"}, "attn_implementation", "contradicts"),
        ("axolotl, QLoRA", {"load_in_4bit": None}, "adapter", "qlora needs load_in_4bit: true"),
        ("axolotl, QLoRA", {"lora_r": 0}, "lora_r", "greater than or equal to 1"),
        ("llamafactory", {"lora_target": "all-linear"}, "lora_target", "say all"),
        ("llamafactory", {"stage": "dpo"}, "stage", "these are: sft, pt"),
        ("llamafactory", {"finetuning_type": "freeze"}, "finetuning_type", "these are: lora, full"),
        ("llamafactory", {"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method", "bitsandbytes"),
        ("llamafactory", {"quantization_bit": 3}, "quantization_bit", "these are: 4, 8"),
        ("llamafactory", {"quantization_bit": 4, "double_quantization": False}, "double_quantization", "scales"),
        ("llamafactory", {"pure_bf16": True}, "pure_bf16", "keeps adapters in bfloat16"),
        ("llamafactory", {"bf16": False}, "bf16", "under autocast"),
        ("llamafactory", {"optim": "muon"}, "optim", "say use_muon: true"),
        ("llamafactory, full", {"deepspeed": {"zero_optimization": {}}}, "deepspeed", "say bf16: true"),
        ("trl", {"load_in_4bit": True}, "use_bnb_nested_quant", "quantised scales"),
        ("trl", {"load_in_8bit": True, "dtype": "float32"}, "bf16", "say dtype: bfloat16"),
        ("trl", {"packing_strategy": "wrapped"}, "packing_strategy", "say packing_strategy: bfd"),
        ("trl", {"packing": False, "padding_free": True}, "padding_free", "for packing alone"),
        ("trl", {"loss_type": "dft"}, "loss_type", "is not measured"),
        ("trl", {"lora_target_modules": None}, "lora_target_modules", "names what gets adapters"),
        (
            "torchtune",
            {"model___component_": "torchtune.models.llama3_2.qlora_llama3_2_1b"},
            "model._component_",
            "torchao",
        ),
        (
            "torchtune",
            {"optimizer___component_": "bitsandbytes.optim.PagedAdamW8bit"},
            "optimizer._component_",
            "is not measured",
        ),
        ("torchtune", {"loss___component_": "torchtune.rlhf.loss.DPOLoss"}, "loss._component_", "is not measured"),
        ("trl", {"attn_implementation": ["sdpa"]}, "attn_implementation", "is not measured"),
        ("axolotl", {"experts_implementation": {"name": "eager"}}, "experts_implementation", "is not measured"),
        ("torchtune", {"model__lora_attn_modules": 4}, "model.lora_attn_modules", "must be a list of names"),
        ("axolotl, QLoRA", {"lora_target_linear": True, "lora_target_modules": 4}, "lora_target_modules", "of names"),
    ],
)
def test_what_is_not_measured_is_refused_at_its_key(name: str, changes: dict[str, Any], field: str, words: str) -> None:
    found = refusal(name, **changes)
    key = f"{FILES[name][0]}.{field}"
    assert words in found.get(key, ""), found


@pytest.mark.parametrize("name", ["axolotl, QLoRA", "llamafactory", "trl"])
def test_zero_of_adapters_on_one_device_changes_nothing(name: str) -> None:
    plain = read(name)
    for config in (
        "ds_z3.json",
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1}, "bf16": {"enabled": "auto"}},
    ):
        asked = read(name, deepspeed=config)
        assert (asked.training, asked.batch_size, asked.hf_config) == (
            plain.training,
            plain.batch_size,
            plain.hf_config,
        )
        assert any("shards nothing on one device" in notice for notice in asked.notices)
    assert read("axolotl", deepspeed=None) == read("axolotl"), "as the refusal says"


def test_what_nothing_knows_is_listed_in_one_line() -> None:
    [notice] = [text for text in read("axolotl", new_trick=True, other_trick=[1]).notices if "not read" in text]
    assert notice.endswith("what they change: new_trick, other_trick")


@pytest.mark.parametrize("name", TRAINER_FILES)
def test_a_key_that_is_not_measured_is_refused_with_its_reason_and_a_harmless_one_is_not_spoken_of(name: str) -> None:
    file = TRAINER_FILES[name]
    for pattern, reason in file.refused.items():
        key = pattern.replace("*", "of_any_kind")
        assert refusal(name, **{key.replace(".", "__"): 3})[f"{name}.{key}"] == reason
    harmless: dict[str, Any] = {key.replace("*", "of_any_kind").replace(".", "__"): 3 for key in file.harmless}
    assert read(name, **harmless).notices == read(name).notices


def test_a_switch_that_is_off_or_a_degree_of_one_is_not_refused() -> None:
    read("axolotl", fsdp=[], liger_rope=False, sequence_parallel_degree=1, rl=None, plugins=None)


def test_whose_file_it_is() -> None:
    files = {name: yaml.safe_load(text) for name, text in (FILES["axolotl"], FILES["trl"], FILES["torchtune"])}
    for name, file in files.items():
        assert find_trainer(file, name) == name
        assert base_model(name, file) == "models/Llama-3.2-1B"
    assert find_trainer(files["axolotl"], None) == find_trainer(files["axolotl"], "bexp") == "axolotl"
    with pytest.raises(FormatError, match="model_name_or_path: say whose file this is: --trainer trl or llamafactory"):
        find_trainer(files["trl"], None)
    others: list[dict[str, Any]] = [{"model": {}, "batch_size": 8}, {"model_type": "llama"}, {"runconfig": {}}]
    for other in others:
        assert find_trainer(other, "axolotl") is None


def test_a_request_beside_a_file_does_not_say_the_same_again() -> None:
    document = beside_its_model(*FILES["axolotl"]) | {"training": {"lora": {"r": 8}}, "budget": {"max_trials": 3}}
    with pytest.raises(FormatError, match=r"axolotl: says what training.lora says as well: keep one"):
        parse_request(document)
    document["training"] = {"sharding": "zero2"}  # which no file says
    asked = parse_request(document, overrides={"num_devices": 2, "lengths": None, "batching": None})
    assert (asked.budget.max_trials, asked.training.sharding) == (3, Sharding.ZERO2)
    with pytest.raises(FormatError, match=r"axolotl: says what batching says as well: keep one"):
        parse_request(document | {"batching": "padded", "lengths": [[8, 9]]})
