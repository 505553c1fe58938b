"""Exports, read by the parsers of the libraries that are installed with the tests; tests/frameworks has the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import Parameter

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.export import export
from bexp.workers.targets.transformers.training_run import TrainerOptimizer
from tests.explorer.exports.samples import SHARDED, candidate, exploration

pytest.importorskip("accelerate")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # 5.23 and newer know another name, too
@pytest.mark.parametrize("precision", ["pure", "autocast"])
@pytest.mark.parametrize("batch_size", [512, None])
def test_transformers_takes_every_field_as_an_argument(precision: str, batch_size: int | None, tmp_path: Path) -> None:
    """The whole file is `TrainingArguments(**fields)`, and says no more than was measured."""
    from transformers import TrainingArguments

    for recompute in (Recompute.NONE, Recompute.FULL, Recompute.PARTIAL_25):
        for changes in ({}, SHARDED):
            training = {**changes.get("training", {}), "precision": precision}
            asked = {**changes, "training": training, "batch_size": batch_size}
            fields = json.loads(export("transformers", exploration(candidate(recompute=recompute), **asked)).text)
            assert "activation_checkpointing" not in fields, "transformers 5.22 and older refuse it"
            found = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **fields)
            assert found.per_device_train_batch_size == 8
            steps = 1 if batch_size is None else batch_size // 8 // (8 if changes else 1)
            assert found.gradient_accumulation_steps == steps
            assert (found.bf16, found.fp16) == (precision == "autocast", False)
            assert bool(found.fsdp) is bool(changes)
            by_fsdp = "activation_checkpointing" in (found.fsdp_config or {})
            assert (found.gradient_checkpointing or by_fsdp) is (recompute is not Recompute.NONE)
            assert found.optim == "adamw_torch_fused"


@pytest.mark.parametrize("name", ["transformers", "llamafactory"])
def test_the_trainer_makes_the_sgd_that_was_measured(name: str, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    fields = yaml.safe_load(export(name, exploration(training={"optimizer": {"name": "sgd"}})).text)
    told = {key: value for key, value in fields.items() if key.startswith("optim")}
    kind, arguments = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(str(tmp_path), use_cpu=True, **told))
    theirs = kind([Parameter(torch.ones(1))], **arguments)
    ours = TrainerOptimizer([Parameter(torch.ones(1))], "sgd")._optimizer
    assert isinstance(ours, type(theirs))
    assert theirs.defaults["momentum"] == ours.defaults["momentum"]


def test_transformers_own_fields_in_a_file_of_llamafactory(tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser((TrainingArguments,))
    own = {"flash_attn", "disable_gradient_checkpointing", "use_reentrant_gc", "pure_bf16", "cutoff_len"}
    adapters: dict[str, Any] = {"training": {"lora": {"r": 4, "target_modules": "all-linear"}}}
    for changes in ({}, SHARDED, adapters):
        values = yaml.safe_load(export("llamafactory", exploration(**changes)).text)
        kept = {key: value for key, value in values.items() if key not in own and not key.startswith(("lora", "fine"))}
        (found,) = parser.parse_dict(kept | {"output_dir": str(tmp_path), "use_cpu": True})
        assert found.per_device_train_batch_size == 8
        assert found.bf16 is (changes is adapters)


def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    path = tmp_path / "accelerate.yaml"
    autocast = {"training": {"precision": "autocast"}}
    cases: tuple[tuple[dict[str, Any], str, str], ...] = (
        ({}, "NO", "no"),
        (autocast, "NO", "bf16"),
        ({"num_devices": 8}, "MULTI_GPU", "no"),
        (SHARDED | {"execution": "compile"}, "FSDP", "no"),
    )
    for changes, kind, precision in cases:
        path.write_text(export("accelerate", exploration(**changes)).text)
        found = ClusterConfig.from_yaml_file(str(path))
        assert found.distributed_type.value == kind
        assert (found.num_processes, found.mixed_precision) == (changes.get("num_devices", 1), precision)
    assert found.fsdp_config["fsdp_reshard_after_forward"] is True
    assert found.dynamo_config["dynamo_use_regional_compilation"] is True


def test_a_configuration_that_was_given_is_exported_whole() -> None:
    plain = yaml.safe_load(export("accelerate", exploration(**SHARDED)).text)
    given = yaml.safe_load(export("accelerate", exploration(**SHARDED, kept={"accelerate": {}})).text)
    assert given["fsdp_config"] == plain["fsdp_config"], "without it accelerate shards by FSDP1"


@pytest.mark.parametrize("level", ["zero2", "zero3"])
def test_axolotl_shards_by_the_second_version_of_fsdp(level: str, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    training = {"sharding": level, "precision": "pure"}
    made = export("axolotl", exploration(num_devices=8, training=training, trainer="axolotl"))
    values = yaml.safe_load(made.text)
    assert (values["fsdp_version"], values.get("fsdp")) == (2, None)
    config = {**values["fsdp_config"], "version": 2}  # as Axolotl hands them on
    found = TrainingArguments(str(tmp_path), use_cpu=True, fsdp=True, fsdp_config=config)
    assert found.fsdp_plugin_args["reshard_after_forward"] is (level == "zero3")
