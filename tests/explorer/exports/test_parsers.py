"""Exports, read by the parsers of the libraries that are installed with the tests; tests/frameworks has the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from bexp.explorer.exports.registry import export
from bexp.explorer.spec.candidate import Recompute
from tests.explorer.exports.samples import SHARDED, candidate, exploration

pytest.importorskip("accelerate")


@dataclass
class ModelArguments:
    attn_implementation: str | None = None
    experts_implementation: str | None = None


@pytest.mark.parametrize("name", ["transformers", "llamafactory"])
def test_transformers_reads_its_fields(name: str, tmp_path: Path) -> None:
    import yaml
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser((ModelArguments, TrainingArguments))  # type: ignore[arg-type]  # it takes several classes
    for recompute in (Recompute.FULL, Recompute.PARTIAL_25):
        for changes in ({}, SHARDED):
            answer = exploration(candidate(recompute=recompute), **changes)
            values = yaml.safe_load(export(name, answer).text) | {"output_dir": str(tmp_path), "use_cpu": True}
            for own in ("flash_attn", "disable_gradient_checkpointing", "use_reentrant_gc"):  # LLaMA-Factory's
                values.pop(own, None)
            model, training = parser.parse_dict(values)
            assert training.per_device_train_batch_size == 8
            assert training.gradient_accumulation_steps == 512 // 8 // (8 if changes else 1)
            assert training.bf16
            assert bool(training.fsdp) is bool(changes)
            if name == "transformers":
                assert (model.attn_implementation, model.experts_implementation) == ("sdpa", "grouped_mm")


def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    path = tmp_path / "accelerate.yaml"
    for changes, kind in (
        ({}, "NO"),
        ({"num_devices": 8}, "MULTI_GPU"),
        (SHARDED | {"execution": "compile"}, "FSDP"),
    ):
        path.write_text(export("accelerate", exploration(**changes)).text)
        found = ClusterConfig.from_yaml_file(str(path))
        assert found.distributed_type.value == kind
        assert (found.num_processes, found.mixed_precision) == (changes.get("num_devices", 1), "bf16")
    assert found.fsdp_config["fsdp_reshard_after_forward"] is True
    assert found.dynamo_config["dynamo_use_regional_compilation"] is True
