"""The model that a request explores: its shapes, a Hugging Face config.json, or a name that its target alone knows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bexp.explorer.dimensions.recompute import Recompute, recomputed_layers
from bexp.explorer.model.model import DType, ModelSpec
from bexp.explorer.model.target import BEXP, TRANSFORMERS


class _Model:
    """A model of which nothing is known. The members of `Explored` override what they know."""

    default_target = BEXP
    """The target of a request that names none."""

    @property
    def may_have_experts(self) -> bool:
        """Whether a layer may have experts, as far as is known."""
        return True

    @property
    def dtype(self) -> DType | None:
        """The number format of the matrix products, where it is known."""
        return None

    @property
    def vocab_size(self) -> int | None:
        """Words of the vocabulary, where they are known."""
        return None

    def as_config(self) -> dict[str, Any]:
        """Return the configuration from which a registered target builds the model."""
        return {}

    def as_fields(self, seq_length: int) -> dict[str, Any]:
        """Return the fields of a request that `bexp.apply` compares with a model; tokens a sequence are as measured."""
        return {}

    def recomputed_layers(self, recompute: Recompute) -> tuple[bool, ...] | None:
        """Return, for each layer, whether a policy recomputes it as a whole, where it is known."""
        return None


@dataclass(frozen=True, slots=True)
class OwnModel(_Model):
    """A model that its target alone knows. It may have no sequences: its rates are then in samples."""

    name: str
    seq_length: None = None


@dataclass(frozen=True, slots=True)
class HuggingFaceConfig(_Model):
    """A config.json of a Hugging Face model, whose keys the transformers library knows."""

    config: dict[str, Any]
    seq_length: int | None

    default_target = TRANSFORMERS

    @property
    def name(self) -> str:
        """The name that the config.json has."""
        return name_of_config(self.config)

    @property
    def vocab_size(self) -> int | None:
        """Words of the vocabulary, if the config.json says it at its top level."""
        size = self.config.get("vocab_size")
        return size if isinstance(size, int) else None

    def as_config(self) -> dict[str, Any]:
        """Return the config.json with the length of a sequence."""
        return self.config | {"seq_length": self.seq_length}

    def as_fields(self, seq_length: int) -> dict[str, Any]:
        """Return the numbers and texts of the config.json, and the tokens of a sequence."""
        scalars = {key: value for key, value in self.config.items() if isinstance(value, str | int | float)}
        return {"hf_config": scalars, "hf_seq_length": seq_length}


@dataclass(frozen=True, slots=True)
class Shapes(_Model):
    """A model by its shapes, which are all that there is to know."""

    model: ModelSpec

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    @property
    def seq_length(self) -> int:
        """Tokens a sequence in training."""
        return self.model.seq_length

    @property
    def may_have_experts(self) -> bool:
        """Whether a layer has experts."""
        return self.model.has_experts

    @property
    def dtype(self) -> DType:
        """The number format of the matrix products."""
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """Words of the vocabulary."""
        return self.model.vocab_size

    def as_config(self) -> dict[str, Any]:
        """Return all shapes."""
        return self.model.model_dump(mode="json")

    def as_fields(self, seq_length: int) -> dict[str, Any]:
        """Return the shapes that have a value."""
        return {"model": self.model.model_dump(mode="json", exclude_none=True)}

    def recomputed_layers(self, recompute: Recompute) -> tuple[bool, ...]:
        """Return, for each layer, whether a policy recomputes it as a whole."""
        return recomputed_layers(self.model, recompute)


Explored = Shapes | HuggingFaceConfig | OwnModel


def name_of_config(config: dict[str, Any]) -> str:
    """Return the name of a Hugging Face config.json: the last part of `_name_or_path`, else its model type."""
    path = config.get("_name_or_path")
    tail = re.sub(r"[^A-Za-z0-9._ -]", "-", path.rstrip("/").split("/")[-1])[:128] if isinstance(path, str) else ""
    return tail if re.match(r"[A-Za-z0-9]", tail) else str(config.get("model_type"))[:128]
