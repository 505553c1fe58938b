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
    autocast = path.suffix in {".autocast", ".master", ".lora", ".lora_all"}
    assert (training.bf16, tuning.pure_bf16) == (autocast, not autocast), path.name
    assert training.optim.value == ("sgd" if path.suffix == ".sgd" else "adamw_torch_fused")
    if "lora" in path.suffix:
        assert (tuning.finetuning_type, tuning.lora_rank) == ("lora", 8)
        assert tuning.lora_alpha == (16 if path.suffix == ".lora" else 8)
        assert tuning.lora_target == (["q_proj", "v_proj"] if path.suffix == ".lora" else ["all"])
    else:
        assert tuning.finetuning_type == "full"
