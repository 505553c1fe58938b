"""Weights in four or eight bits, as transformers loads them with the bitsandbytes package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from bexp.explorer.model.amounts import bytes_text
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.optimizers import BITSANDBYTES

PLAIN = "none"
QuantizationName = Literal["none", "bnb_4bit", "bnb_8bit"]
QLORA: Mapping[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}
"""NF4 with quantised scales, for computation in bfloat16 (Dettmers et al., 2023, arXiv:2305.14314)."""
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {"bnb_4bit": QLORA, "bnb_8bit": {"load_in_8bit": True}}
"""The quantisations of a request by name, as arguments of transformers' BitsAndBytesConfig."""

WeightKind = Literal["attention", "dense MLP", "experts", "embeddings and head", "adapters", "other"]


class WeightBytes(Frozen):
    """Bytes of a model's weights of one kind. `quantized_bytes` are those of quantised ones, their scales included."""

    kind: WeightKind
    num_bytes: Annotated[int, Field(ge=0)]
    quantized_bytes: Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Quantization:
    """A quantisation of weights.

    `document` has the arguments of BitsAndBytesConfig, as JSON. With `is_own` they are those of the config.json, whose
    checkpoint then holds quantised weights.
    """

    document: str
    is_own: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of BitsAndBytesConfig."""
        arguments: dict[str, Any] = json.loads(self.document)
        return arguments

    @property
    def bits(self) -> int:
        """Bits of a quantised weight."""
        return 4 if self.arguments.get("load_in_4bit") else 8

    @property
    def name(self) -> str:
        """The name by which a request asks for as many bits."""
        return f"bnb_{self.bits}bit"


def own_method(config: Mapping[str, Any] | None) -> str | None:
    """Return the method that quantised a config.json's checkpoint; None without one, `?` if it is not named.

    Early configurations of bitsandbytes name only their bits.
    """
    own = (config or {}).get("quantization_config")
    if not own:
        return None
    if isinstance(own, Mapping) and (own.get("load_in_4bit") or own.get("load_in_8bit")):
        return BITSANDBYTES
    method = own.get("quant_method") if isinstance(own, Mapping) else None
    return method if isinstance(method, str) else "?"


def quantization_of(name: str | None, config: Mapping[str, Any] | None) -> Quantization | None:
    """Return the quantisation that a request's `quantization` and config.json ask for; None for plain weights.

    transformers prefers that of the checkpoint. A method that is not bitsandbytes' is left out.
    """
    own: Any = (config or {}).get("quantization_config")
    if name == PLAIN:
        return None
    states_bits = isinstance(own, Mapping) and bool(own.get("load_in_4bit")) is not bool(own.get("load_in_8bit"))
    if states_bits and own_method(config) == BITSANDBYTES:
        return Quantization(json.dumps(dict(own), sort_keys=True), is_own=True)
    return None if name is None else Quantization(json.dumps(ARGUMENTS[name], sort_keys=True), is_own=False)


def describe_weights(weights: Iterable[WeightBytes]) -> str:
    """Return the quantised bytes of each kind of weights, in one line."""
    kinds = list(weights)
    total, quantized = sum(one.num_bytes for one in kinds), sum(one.quantized_bytes for one in kinds)
    parts = [f"{one.kind} {bytes_text(one.quantized_bytes)} of {bytes_text(one.num_bytes)}" for one in kinds]
    line = f"{bytes_text(quantized)} of {bytes_text(total)} are quantised: {', '.join(parts)}"
    if any(one.kind == "experts" and not one.quantized_bytes for one in kinds):
        line += "; transformers quantises linear layers alone, and these experts are none"
    return line
