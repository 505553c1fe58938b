"""Megatron-Core: flags of recomputation, of a mesh, and of what replicas exchange."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.export import export
from bexp.explorer.model.training import Sharding
from tests.explorer.exports.samples import candidate, exploration
from tests.explorer.exports.test_formats import flags
from tests.explorer.exports.test_meshes import pairs, planned


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


def test_megatron_says_that_it_keeps_gradients_in_float32() -> None:
    asked: dict[str, Any] = {"num_devices": 8, "training": {"optimizer": {"grad_dtype": "float32"}}}
    lines = [
        [line for line in export("megatron", exploration(**each)).header if line.startswith("memory:")]
        for each in (dict[str, Any](), asked)
    ]
    assert len(lines[0]) == 1 and "measured in bfloat16" in lines[0][0]
    assert lines[1] == []


def test_megatron_is_told_the_mesh_and_the_balance_of_its_layers() -> None:
    made = export("megatron", planned())
    given = pairs(flags(made, "MEGATRON_FLAGS"))
    assert given["--tensor-model-parallel-size"] == given["--pipeline-model-parallel-size"] == "2"
    assert given["--pipeline-model-parallel-layout"] == "Et*3|t*3|t*3|t*1L"
    assert given["--expert-model-parallel-size"] == "4"
    assert given["--expert-tensor-parallel-size"] == "1"
    assert {"--sequence-parallel", "--use-distributed-optimizer"} <= given.keys()
    assert {"--overlap-grad-reduce", "--overlap-param-gather"} <= given.keys(), "as its seconds take it"
    assert (given["--micro-batch-size"], given["--global-batch-size"]) == ("4", "512")
    assert "16 accumulation steps x 8 data-parallel" in made.text
    assert "layers of each stage: 3, 3, 3, 1" in made.text


def test_megatron_overlaps_only_what_replicas_exchange() -> None:
    whole = pairs(flags(export("megatron", planned(sharding=Sharding.NONE)), "MEGATRON_FLAGS"))
    assert "--overlap-grad-reduce" in whole
    assert "--overlap-param-gather" not in whole, "only a distributed optimizer gathers parameters"
    alone = planned(tensor=16, data=1, expert=1, sharding=Sharding.NONE)
    assert "--overlap-grad-reduce" not in flags(export("megatron", alone), "MEGATRON_FLAGS")
