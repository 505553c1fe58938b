"""Reads files with DeepSpeed's own class of configurations, with eight processes where the export is for eight."""

import os
import sys
from pathlib import Path
from unittest.mock import patch

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from deepspeed.runtime import config

for path in sorted(Path(sys.argv[1]).iterdir()):
    world = 8 if "x 8 data-parallel" in path.read_text() else 1
    with (
        patch.object(config.dist, "get_rank", return_value=0),
        patch.object(config.dist, "get_world_size", return_value=world),
    ):
        found = config.DeepSpeedConfig(str(path))
    size = found.train_micro_batch_size_per_gpu * found.gradient_accumulation_steps * world
    expected = {".no_batch": 8, ".replaced": 96}.get(path.suffix, 512)
    assert found.train_batch_size == size == expected, path.name
    if path.suffix in {".zero1", ".zero2", ".zero3"}:
        assert found.zero_config.stage == int(path.suffix[-1])
        assert found.zero_config.overlap_comm is True
    autocast = path.suffix == ".autocast" or "lora" in path.suffix
    assert found.bfloat16_config.enabled is not autocast, path.name
    assert found.torch_autocast_enabled is autocast, path.name
    assert not autocast or found.torch_autocast_dtype is torch.bfloat16
