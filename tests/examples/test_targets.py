"""The example targets, explored as a person would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]
TARGETS = ROOT / "examples" / "targets"
TINY = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 64, "seq_length": 16}


def explore(folder: Path, target: str, config: Mapping[str, object], device: str = "cpu") -> dict[str, object]:
    """Run `bexp explore` in an empty folder, and return its answer as JSON."""
    request = {
        "target_config": dict(config),
        "batch_size": 8,
        "micro_batch_size": [1, 2, 4],
        "budget": {"max_trials": 3},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(request))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("BEXP_")}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "api.cli", "explore", path, "--target", target, "--device", device, "--json"],
        check=False,
        cwd=folder,
        env=environment
        | {"PYTHONPATH": os.pathsep.join(paths), "XDG_DATA_HOME": str(folder), "TMPDIR": str(folder)}
        | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_gpt_in_plain_pytorch_is_explored_end_to_end(tmp_path: Path) -> None:
    found = explore(tmp_path, f"{TARGETS / 'gpt.py'}:Target", TINY)
    assert (found["target"], found["target_version"], found["target_class"]) == ("local.gpt", "gpt.py:Target", "GPT")
    best = found["recommendation"]
    assert isinstance(best, dict)
    assert best["candidate"]["micro_batch_size"] in {1, 2, 4}
    assert best["whole_model"]["measurement"]["peak_bytes"] > 0
    parameters = 64 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32 + 64 * 32
    assert best["memory"]["parameters"] == 4 * parameters


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_a_lightning_module_is_explored_with_its_own_optimizer(tmp_path: Path) -> None:
    found = explore(tmp_path, f"{TARGETS / 'lightning_module.py'}:Target", TINY)
    assert found["target_class"] == "LanguageModel"


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torchtitan's attention has no backward pass on the CPU")
def test_torchtitans_own_llama_is_explored(tmp_path: Path) -> None:
    config = {"flavor": "debugmodel", "seq_length": 256}
    found = explore(tmp_path, f"{TARGETS / 'torchtitan_llama.py'}:Target", config, device="cuda:0")
    assert found["target_class"] == "Llama3Model"


def test_the_request_for_the_examples_is_a_valid_one() -> None:
    from explorer.formats.request import parse_request

    request = parse_request(yaml.safe_load((TARGETS / "gpt.yaml").read_text()), overrides={"target": "local"})
    assert request.target_config is not None
    assert set(request.target_config) == set(TINY)
