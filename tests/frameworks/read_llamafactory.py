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
    model, _, training, *_ = parser._parse_train_args({**named, "do_train": True, "use_cpu": True, **values})
    assert training.per_device_train_batch_size == values["per_device_train_batch_size"]
    assert model.disable_gradient_checkpointing is values["disable_gradient_checkpointing"]
    assert training.bf16 is True
