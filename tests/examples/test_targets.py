"""The example targets, explored as a person would."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from tests.waits import PATIENCE_SECONDS

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
        [sys.executable, "-m", "bexp.api.cli", "explore", path, "--target", target, "--device", device, "--json"],
        check=False,
        cwd=folder,
        env=environment
        | {"PYTHONPATH": os.pathsep.join(paths), "XDG_DATA_HOME": str(folder), "TMPDIR": str(folder)}
        | {"BEXP_LOCK_DIRECTORY": str(folder), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
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
    assert best["measured_peak_bytes"] > 0
    assert best["whole_model"] is None, "each trial has measured the whole"
    parameters = 64 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32 + 64 * 32
    assert best["memory"]["parameters"] == 4 * parameters


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_a_lightning_module_is_explored_with_its_own_optimizer(tmp_path: Path) -> None:
    found = explore(tmp_path, f"{TARGETS / 'lightning_module.py'}:Target", TINY)
    assert found["target_class"] == "LanguageModel"


FOLDER_CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_folder_with_code_of_its_own_is_built_and_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(FOLDER_CODE)
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names, **sizes}))
    target = runpy.run_path(str(TARGETS / "hugging_face.py"))["Target"]()
    config = {"folder": str(folder), "seq_length": 16, "overrides": {"vocab_size": 61}, "gradient_checkpointing": True}
    model = target.build(config, torch.device("cpu"))
    assert model.training
    assert any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    batch = target.batch(3, torch.device("cpu"))
    assert batch["input_ids"].shape == (3, 16)
    assert bool(torch.isfinite(target.step(model, batch)))
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.dtype is torch.bfloat16 for gradient in gradients)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torchtitan's attention has no backward pass on the CPU")
def test_torchtitans_own_llama_is_explored(tmp_path: Path) -> None:
    config = {"flavor": "debugmodel", "seq_length": 256}
    found = explore(tmp_path, f"{TARGETS / 'torchtitan_llama.py'}:Target", config, device="cuda:0")
    assert found["target_class"] == "Llama3Model"


def test_the_request_for_the_examples_is_a_valid_one() -> None:
    from bexp.explorer.formats.request import parse_request

    request = parse_request(yaml.safe_load((TARGETS / "gpt.yaml").read_text()), overrides={"target": "local"})
    assert request.target_config is not None
    assert set(request.target_config) == set(TINY)
