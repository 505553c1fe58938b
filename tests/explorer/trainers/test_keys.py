"""One table of keys for both directions: what an export writes is read back as what was measured."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from bexp.explorer.exports.export import export
from bexp.explorer.formats.request import parse_request
from bexp.explorer.formats.training_files import why_refused
from bexp.explorer.model.training import LoRASpec, Sharding
from bexp.explorer.trainers.document import ExportError
from bexp.explorer.trainers.keys import Setting
from bexp.explorer.trainers.registry import FILES, TRAINERS
from tests.explorer.exports.samples import CONFIG, SHARDED, candidate, exploration

WRITTEN = [name for name, file in FILES.items() if not file.is_nested]
LINEAR: dict[str, Any] = {"r": 8, "alpha": 8, "target_modules": "linear-modules"}
QUANTIZED: dict[str, Any] = {"quantization": "bnb_4bit", "training": {"lora": LINEAR}}
CASES: dict[str, dict[str, Any]] = {
    "pure": {},
    "sharded": SHARDED,
    "full rows": {"batch_size": 8},
    "optimizer": {"training": {"optimizer": {"name": "adafactor", "master_dtype": None}}},
    "muon": {
        "hf_config": {**CONFIG, "num_experts": 1},
        "training": {"optimizer": {"name": "muon", "master_dtype": None}},
    },
    "padded": {"lengths": [[100, 10], [900, 4]], "batching": "padded"},
    "grouped": {"lengths": [[100, 10], [900, 4]], "batching": "grouped"},
    "adapters": {
        "training": {
            "lora": {
                **{"r": 16, "alpha": 24, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
                **{"modules_to_save": ["lm_head"], "use_dora": True, "use_rslora": True},
            }
        }
    },
    "single parameters": {"training": {"lora": {"r": 8, "alpha": 8, "target_parameters": ["experts.gate_up_proj"]}}},
    "QLoRA": QUANTIZED,
    "in 8 bits": {**QUANTIZED, "quantization": "bnb_8bit"},
}


def settings_of(name: str, **changes: Any) -> list[str] | None:
    """The lines of an export but the one that names the measured candidate; None if the trainer cannot express it."""
    try:
        document = export(name, exploration(candidate(**changes), trainer=name))
    except ExportError:
        return None
    return [line for line in (*document.text.splitlines(), *document.header) if "measured candidate" not in line]


@pytest.mark.parametrize(
    "change",
    [
        {"recompute": "full"},
        {"attention_backend": "flash_attention_2"},
        {"expert_backend": "batched_mm"},
        {"execution": "compile"},
        {"kernels": "liger"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", WRITTEN)
def test_an_export_says_each_setting_that_its_trainer_can_express(name: str, change: dict[str, str]) -> None:
    """A trainer that is taken to express what no key of its file holds would run something else."""
    found = settings_of(name, **change)
    assert found is None or found != settings_of(name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", WRITTEN)
def test_an_export_is_read_back_as_what_was_measured(name: str, case: str) -> None:
    """Adapters of TRL stand in its script, and sharding in a launcher of each."""
    lora = CASES[case].get("training", {}).get("lora")
    settings = {known.setting for known in FILES[name].keys.values()}
    if (case == "sharded" and TRAINERS[name].lacks("sharding", Sharding.ZERO3)) or (
        case == "grouped" and Setting.ORDER not in settings
    ):
        return
    if case == "muon" and name == "trl":  # TrainingArguments have no name for it
        return
    if lora is not None and (name == "trl" or TRAINERS[name].lacks("adapters", LoRASpec.model_validate(lora))):
        return
    dense: dict[str, Any] = {"expert_backend": None} if case == "muon" else {}
    answer = exploration(candidate(recompute="full", **dense), trainer=name, **CASES[case])
    asked = answer.request
    assert asked is not None
    assert asked.hf_config is not None
    written = yaml.safe_load(export(name, answer).text)
    own = {key: value for key, value in written.items() if not why_refused(name, key)}
    beside = {"num_devices": asked.num_devices} | {key: CASES[case][key] for key in ("lengths",) if key in CASES[case]}
    own |= {"dtype": "bfloat16"} if name == "trl" else {}  # which its header says
    document = {name: {**own, FILES[name].model: "models/olmoe"}, "model": {**asked.hf_config, "dtype": "bfloat16"}}
    again = parse_request(document, overrides=beside)
    assert (again.trainer, again.base_micro_batch_size, again.batch_size) == (name, 8, asked.batch_size)
    assert (again.seq_length, again.quantization) == (asked.seq_length, asked.quantization)
    assert again.training.optimizer.name == asked.training.optimizer.name
    assert (again.training.lora, again.batching) == (asked.training.lora, asked.batching)
    assert not any("not read" in notice for notice in again.notices), "each key is known to the same table"


@pytest.mark.parametrize("name", FILES)
def test_a_key_is_read_refused_or_harmless_and_nothing_else(name: str) -> None:
    file = FILES[name]
    read = {key for key, known in file.keys.items() if known.is_read}
    assert file.model in read
    assert not read & (file.harmless | file.refused.keys())


def test_a_title_and_a_name_belong_to_one_trainer() -> None:
    assert len({trainer.title for trainer in TRAINERS.values()}) == len(TRAINERS)
