"""Reads files with TRL's configuration, which refuses keys that it does not know, and as `trl sft --config` does."""

import json
import sys
from pathlib import Path

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

CLASSES = (ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)
CPU = ["--use_cpu", "true"]

for path in sorted(Path(sys.argv[1]).iterdir()):
    values = json.loads(path.read_text())
    found = SFTConfig(**{**values, "output_dir": "out", "use_cpu": True})
    assert found.per_device_train_batch_size == values["per_device_train_batch_size"], path.name
    assert found.gradient_checkpointing is values["gradient_checkpointing"], path.name
    assert (found.packing, found.bf16) == (values["packing"], values["bf16"]), path.name
    assert found.max_length == values["max_length"], path.name
for path in sorted((Path(sys.argv[1]).parent / "own").iterdir()):
    _, training, model, _ = TrlParser(CLASSES).parse_args_and_config(
        ["--config", str(path), *CPU], fail_with_unknown_args=True
    )
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (8, 2), path.name
    assert not training.gradient_checkpointing, path.name
    assert training.packing is (model.use_peft is True), path.name
    assert training.bf16, path.name
    assert model.dtype == ("bfloat16" if model.use_peft else "float32"), path.name
