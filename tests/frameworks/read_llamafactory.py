"""Reads files with LLaMA-Factory's parser, which refuses keys that none of its dataclasses has."""

import os
import sys
from pathlib import Path

import yaml

os.environ["DISABLE_VERSION_CHECK"] = "1"  # it names the versions of libraries that it was tested with
from llamafactory.hparams import parser

for path in sorted(Path(sys.argv[1]).iterdir()):
    values = yaml.safe_load(path.read_text())
    named = {"model_name_or_path": "model", "dataset": "data", "output_dir": "out", "stage": "sft"}
    model, data, training, tuning, _ = parser._parse_train_args({**named, "do_train": True, "use_cpu": True, **values})
    assert training.per_device_train_batch_size == values["per_device_train_batch_size"]
    assert model.disable_gradient_checkpointing is values["disable_gradient_checkpointing"]
    assert data.cutoff_len == values["cutoff_len"]
    autocast = path.suffix in {".autocast", ".master"} or "lora" in path.suffix
    assert (training.bf16, tuning.pure_bf16) == (autocast, not autocast), path.name
    assert training.optim.value == ("sgd" if path.suffix == ".sgd" else "adamw_torch_fused")
    assert tuning.use_muon is (path.suffix == ".muon")
    assert training.optim_args == ("momentum=0.9" if path.suffix == ".sgd" else None)
    if "lora" in path.suffix:
        assert (tuning.finetuning_type, tuning.lora_rank) == ("lora", 8)
        assert tuning.lora_alpha == (16 if path.suffix == ".lora" else 8)
        assert tuning.lora_target == {".lora": ["q_proj", "v_proj"], ".lora_8bit": ["q_proj"]}.get(path.suffix, ["all"])
        bits = {".qlora": 4, ".lora_8bit": 8}.get(path.suffix)
        assert (model.quantization_bit, model.quantization_method, model.quantization_type) == (bits, "bnb", "nf4")
        assert model.double_quantization
        is_eight = path.suffix == ".lora_8bit"
        assert (tuning.use_dora, tuning.use_rslora) == (is_eight, is_eight)
        assert tuning.additional_target == (["lm_head"] if is_eight else None)
    else:
        assert tuning.finetuning_type == "full"

for path in sorted((Path(sys.argv[1]).parent / "own").iterdir()):
    values = yaml.safe_load(path.read_text())
    model, data, training, tuning, _ = parser._parse_train_args({**values, "use_cpu": True})
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (8, 1)
    assert (tuning.finetuning_type, tuning.lora_alpha) == (values["finetuning_type"], 16)
    assert data.packing is values.get("packing")
    assert model.disable_gradient_checkpointing
