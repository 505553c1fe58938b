"""Rules of every format; `test_recorded_exports` has what each says."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from bexp.explorer.exports.export import export
from bexp.explorer.trainers.registry import FORMATS
from tests.explorer.exports.samples import SHARDED, exploration

LEARNING = ("learning_rate", "lr_", "weight_decay", "warmup", "seed", "max_steps", "epochs", "adam_", "betas", "clip")
"""Parts of names that decide what is learnt."""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "changes", [{"allocator": "expandable_segments"}, SHARDED], ids=["one device", "eight, sharded"]
)
def test_an_export_names_what_was_measured_and_promises_that_speed_alone(name: str, changes: dict[str, Any]) -> None:
    made = export(name, exploration(**changes))
    header = "\n".join(made.header)
    assert "measured: target transformers 5.23.0, OlmoeForCausalLM on NVIDIA H200" in header
    layers_of_its_own = name in {"torchtitan", "torchtitan-main", "megatron", "cerebras"}
    formats_of_its_own = name == "deepspeed" or (name == "axolotl" and "num_devices" not in changes)
    otherwise = layers_of_its_own or formats_of_its_own or name == "trl"  # which computes its own loss
    assert ("expect about 1,000 tokens/s" in header) is not otherwise
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in header) is ("allocator" in changes)
    assert not any(part in made.text for part in LEARNING)
    if made.has_header:
        assert all(" ".join(line.split()) in made.text.replace('\\"', '"') for line in made.header)


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "torchtitan-main"])
def test_flags_are_an_array_that_bash_reads(name: str) -> None:
    made = export(name, exploration())
    script = f'{made.text}\nprintf "%s\\n" "${{{name.partition("-")[0].upper()}_FLAGS[@]}}"'
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert found[0].startswith("--")
    assert len(found) > 10
    assert all(word in made.text for word in found)
