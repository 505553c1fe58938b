"""The explorations whose waiting times are recorded, as variants of examples/."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.environment import ROOT

EXAMPLES = ROOT / "examples"
QUICK: dict[str, Any] = {"verify": False, "budget": {"confidence_target": 90}}
"""Fields of a run that ends at a confidence of 90, without whole models."""
_ONE: dict[str, Any] = {"num_devices": 1, "training": {"sharding": "none"}}
_GPT: dict[str, Any] = {
    **{"model_type": "gpt2", "n_layer": 24, "n_embd": 2048, "n_inner": 8192, "n_head": 16, "vocab_size": 50257},
    **{"n_positions": 2048, "seq_length": 2048, "torch_dtype": "bfloat16"},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@dataclass(frozen=True)
class Variant:
    """An example with other layers and fields. A `whole_model` takes the place of the example's."""

    example: str
    fields: dict[str, Any] = field(default_factory=dict)
    num_layers: int | None = None
    whole_model: dict[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        """Return the configuration."""
        found: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{self.example}.yaml").read_text())
        model = found["model"] if self.whole_model is None else self.whole_model
        layers = {} if self.num_layers is None else {"num_hidden_layers": self.num_layers}
        return found | self.fields | {"model": model | layers}


_TRANSFORMERS = {"target": "transformers"} | QUICK
_LIKE = {"fresh": False} | QUICK
VARIANTS = {
    "olmoe-1b-7b-8-layers-kernels-not-built": Variant("olmoe-1b-7b", QUICK, 8),
    "llama-3.2-1b": Variant("llama-3.2-1b"),
    "olmoe-1b-7b-8-layers": Variant("olmoe-1b-7b", num_layers=8),
    "cerebras-gpt-1.3b": Variant("cerebras-gpt-1.3b"),
    "llama-3.2-1b-12-layers-like": Variant("llama-3.2-1b", _LIKE, 12),
    "qwen3-30b-a3b-4-layers": Variant("qwen3-30b-a3b", _ONE, 4),
    "llama-3.2-1b-transformers": Variant("llama-3.2-1b", _TRANSFORMERS),
    "olmoe-1b-7b-6-layers-like": Variant("olmoe-1b-7b", _LIKE, 6),
    "qwen3-30b-a3b-3-layers-like": Variant("qwen3-30b-a3b", _ONE | _LIKE, 3),
    "cerebras-gpt-1.3b-transformers": Variant("cerebras-gpt-1.3b", _TRANSFORMERS, whole_model=_GPT),
    "olmoe-1b-7b-8-layers-transformers": Variant("olmoe-1b-7b", _TRANSFORMERS, 8),
}
"""By the name of the run, in the order in which they run: those that are like others come after these."""


def write_configs(folder: Path, names: tuple[str, ...]) -> list[str]:
    """Write the configurations of these names, and return their paths in the order of `VARIANTS`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.yaml" for name in VARIANTS if name in names}
    for name, path in paths.items():
        path.write_text(yaml.safe_dump(VARIANTS[name].document()))
    return [str(path) for path in paths.values()]
