"""Reads flags with Megatron-Core's argument parser, validates them, and builds its TransformerConfig from them."""

import argparse
import os
import subprocess
import sys
import typing
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import torch
import typing_extensions

if not hasattr(typing, "override"):  # Megatron-Core 0.19 is for Python 3.12
    setattr(typing, "override", typing_extensions.override)  # noqa: B010 - it has no such attribute to a type checker

from megatron.core.transformer import TransformerConfig
from megatron.training.arguments import add_megatron_arguments, validate_args

NUM_DEVICES = {".zero1": 8, ".zero2": 8, ".zero3": 8, ".shared": 8, ".alone": 8}
"""By answer; meshes have 32, and other answers one."""
MESHES = {".interleaved", ".piped", ".mesh_zero1", ".mesh_zero2", ".mesh_zero3"}
MODEL = [
    *("--num-layers", "10", "--hidden-size", "64", "--num-attention-heads", "8"),
    *("--max-position-embeddings", "4096", "--num-experts", "8", "--disable-bias-linear", "--train-iters", "1"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "64", "--lr", "1e-4"),
]

for path in sorted(Path(sys.argv[1]).iterdir()):
    script = f'source {path}\nprintf "%s\\n" "${{MEGATRON_FLAGS[@]}}"'
    flags = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    found = parser.parse_args(flags)
    assert found.global_batch_size == {".no_batch": None, ".replaced": 96}.get(path.suffix, 512), path.name
    assert found.bf16
    config = TransformerConfig(
        num_layers=16,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=8,
        add_bias_linear=False,
        attention_backend=found.attention_backend,
        moe_grouped_gemm=found.moe_grouped_gemm,
        recompute_granularity=found.recompute_granularity,
        recompute_method=found.recompute_method,
        recompute_num_layers=found.recompute_num_layers,
        recompute_modules=found.recompute_modules,
        context_parallel_size=found.context_parallel_size,
    )
    assert config.moe_grouped_gemm

    replicas = NUM_DEVICES.get(path.suffix, 32 if path.suffix in MESHES else 1)
    # Megatron asks for one queue of work, but its FSDP refuses that.
    connections = "32" if path.suffix[-1] in "23" else "1"
    validated = parser.parse_args([*flags, *MODEL])
    validated.rank, validated.world_size = 0, replicas
    with (
        patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        patch.object(torch.cuda, "get_device_properties", return_value=argparse.Namespace(major=9)),
        patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": connections}),
        redirect_stdout(StringIO()),  # it prints all arguments
    ):
        validate_args(validated)
    seq_length = 128 if path.suffix in MESHES | {".alone"} else 2048 if path.suffix == ".replaced" else 4096
    assert validated.seq_length == seq_length, path.name
    assert validated.params_dtype is torch.bfloat16
    exchanges = found.context_parallel_size * validated.data_parallel_size > 1
    assert validated.overlap_grad_reduce is exchanges, path.name
    sharded = "zero" in path.suffix or path.suffix == ".interleaved"
    assert validated.overlap_param_gather is validated.use_distributed_optimizer is sharded, path.name
    if path.suffix[-1] in "23":
        strategy = {"2": "optim_grads", "3": "optim_grads_params"}[path.suffix[-1]]
        assert (validated.use_megatron_fsdp, validated.data_parallel_sharding_strategy) == (True, strategy), path.name
    else:
        assert not validated.use_megatron_fsdp, path.name
