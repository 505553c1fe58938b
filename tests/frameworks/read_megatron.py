"""Reads flags with Megatron-Core's argument parser, and builds its TransformerConfig from them."""

import argparse
import subprocess
import sys
import typing
from pathlib import Path

import typing_extensions

if not hasattr(typing, "override"):  # Megatron-Core 0.19 is for Python 3.12
    setattr(typing, "override", typing_extensions.override)  # noqa: B010 - it has no such attribute to a type checker

from megatron.core.transformer import TransformerConfig
from megatron.training.arguments import add_megatron_arguments

for path in sorted(Path(sys.argv[1]).iterdir()):
    script = f'source {path}\nprintf "%s\\n" "${{MEGATRON_FLAGS[@]}}"'
    flags = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    found = parser.parse_args(flags)
    assert found.global_batch_size == 512
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
