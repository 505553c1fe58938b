"""What a request names is never fetched, by the profiler process that would build a model of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.process.profiler import Profiler
from tests.explorer.model.test_config_rules import NAMES

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
HOSTILE: list[dict[str, Any]] = [
    *NAMES,
    {"model_type": "owner/name"},
    {"hidden_act": "kernels-community/activation"},
    {"dtype": "hub"},
    {"from_pretrained": "owner/name"},
    {"trust_remote_code": True},
]
GUARD = """
import os, socket
FOUND = os.environ["FOUND"]
def found(what):
    with open(FOUND, "a") as file:
        file.write(f"{what}\\n")
    raise OSError(what)
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, lambda *given, name=name: found(f"{name} {given[1:]}"))
socket.getaddrinfo = lambda *given, **_: found(f"getaddrinfo {given}")
"""
KERNELS = """
from types import SimpleNamespace
from sitecustomize import found
def get_kernel(name, **_):
    found(f"get_kernel {name}")
def use_kernel_forward_from_hub(*_, **__):
    return lambda made: made
use_kernelized_func = use_kernel_forward_from_hub
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: SimpleNamespace()
"""


@pytest.fixture
def guarded(tmp_path: Path) -> dict[str, str]:
    """An environment that notes whatever reaches for the network, with kernels that are fetched, and an empty cache."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    packages = tmp_path / "packages"
    (packages / "kernels").mkdir(parents=True)
    (packages / "sitecustomize.py").write_text(GUARD)
    (packages / "kernels" / "__init__.py").write_text(KERNELS)
    about = packages / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    cache = {"HF_HOME": str(tmp_path / "cache"), "FOUND": str(tmp_path / "found"), "PYTHONPATH": str(packages)}
    return {**os.environ, **cache, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}


def read(config: dict[str, Any]) -> ExplorationRequest | None:
    try:
        return parse_request({"hf_config": config, "hf_seq_length": 16, "quantization": "none", "quick": True})
    except FormatError:
        return None


def test_hostile_configurations_fetch_nothing_where_libraries_may_fetch(
    tmp_path: Path, guarded: dict[str, str]
) -> None:
    requests = [request for names in HOSTILE if (request := read(TINY | names)) is not None]
    assert len(requests) >= 20
    with Profiler("cpu", environment=guarded, lock_directory=tmp_path) as profiler:
        refusals = {json.dumps(request.hf_config): profiler.begin(request).refusal for request in requests}
    assert not (tmp_path / "found").exists(), (tmp_path / "found").read_text()
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    assert refusals[json.dumps(TINY)] is None, "what is left of most is the model itself"
