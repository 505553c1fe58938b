"""The model that a request explores: its shapes, a Hugging Face config.json, or a name that its target alone knows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bexp.explorer.dimensions.recompute import Recompute, recomputed_layers
from bexp.explorer.model.model import EXPERT_COUNTS, DType, ModelSpec


@dataclass(frozen=True, slots=True)
class Explored:
    """A model: its `shapes`, the `config` of a Hugging Face model, or neither if its target alone knows it."""

    name: str
    seq_length: int | None = None
    """Tokens a sequence in training; None for a model that may have no sequences: its rates are then in samples."""
    shapes: ModelSpec | None = None
    config: dict[str, Any] | None = None

    @property
    def may_have_experts(self) -> bool:
        """Whether a layer may have experts, as far as is known."""
        return self.shapes is None or self.shapes.has_experts

    @property
    def names_experts(self) -> bool:
        """Whether the description says that layers have experts."""
        if self.shapes is not None:
            return self.shapes.has_experts
        config = self.config or {}
        inner = config.get("text_config")
        found = [each.get(name) for each in (config, inner) if isinstance(each, dict) for name in EXPERT_COUNTS]
        return any(isinstance(count, int) and count > 1 for count in found)

    @property
    def dtype(self) -> DType | None:
        """The number format of the matrix products, where it is known."""
        return None if self.shapes is None else self.shapes.dtype

    @property
    def vocab_size(self) -> int | None:
        """Words of the vocabulary, where they are known: a config.json may say them at its top level."""
        size = (self.config or {}).get("vocab_size") if self.shapes is None else self.shapes.vocab_size
        return size if isinstance(size, int) else None

    def as_config(self) -> dict[str, Any]:
        """Return the configuration from which a registered target builds the model."""
        if self.shapes is not None:
            return self.shapes.model_dump(mode="json")
        return {} if self.config is None else self.config | {"seq_length": self.seq_length}

    def as_fields(self, seq_length: int) -> dict[str, Any]:
        """Return the fields of a request that `bexp.apply` compares with a model; tokens a sequence are as measured."""
        if self.shapes is not None:
            return {"model": self.shapes.model_dump(mode="json", exclude_none=True)}
        if self.config is None:
            return {}
        scalars = {key: value for key, value in self.config.items() if isinstance(value, str | int | float)}
        return {"hf_config": scalars, "hf_seq_length": seq_length}

    def recomputed_layers(self, recompute: Recompute) -> tuple[bool, ...] | None:
        """Return, for each layer, whether a policy recomputes it as a whole, where it is known."""
        return None if self.shapes is None else recomputed_layers(self.shapes, recompute)


def name_of_config(config: dict[str, Any]) -> str:
    """Return the name of a Hugging Face config.json: the last part of `_name_or_path`, else its model type."""
    path = config.get("_name_or_path")
    tail = re.sub(r"[^A-Za-z0-9._ -]", "-", path.rstrip("/").split("/")[-1])[:128] if isinstance(path, str) else ""
    return tail if re.match(r"[A-Za-z0-9]", tail) else str(config.get("model_type"))[:128]
