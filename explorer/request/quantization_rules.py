"""Rules between quantised weights and the other fields of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.model.base import RuleError
from bexp.explorer.model.optimizers import BITSANDBYTES
from bexp.explorer.model.quantization import PLAIN, Quantization, own_method
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.target import TRANSFORMERS
from bexp.explorer.model.training import Sharding

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest

OWN = "hf_config.quantization_config"
PLAIN_WEIGHTS = f"quantization: {PLAIN} measures plain weights"


def check_quantization(request: ExplorationRequest) -> None:
    """Quantised weights are a transformers model's, whole on a device, and trained through adapters alone."""
    name, target = request.quantization, request.target_name
    if name not in (None, PLAIN) and target != TRANSFORMERS:
        raise RuleError(f"quantization '{name}' needs target '{TRANSFORMERS}'", "quantization", "target")
    if target != TRANSFORMERS or name == PLAIN:
        return
    _check_checkpoint(request)
    quantized = request.quantized
    if quantized is not None and request.mode == "train":
        _check_training(request, quantized)


def _check_checkpoint(request: ExplorationRequest) -> None:
    """A checkpoint that is quantised already is loaded as it is."""
    method, name = own_method(request.hf_config), request.quantization
    if method is None:
        return
    quantized = request.quantized
    if method == BITSANDBYTES:
        if quantized is None or not quantized.is_own:
            raise RuleError(f"must state either load_in_4bit or load_in_8bit; {PLAIN_WEIGHTS}", OWN)
        if name not in (None, quantized.name):
            raise RuleError(
                f"the weights of config.json have {quantized.bits} bits already; {PLAIN_WEIGHTS}", "quantization", OWN
            )
    elif name is not None:
        raise RuleError(
            f"the weights of config.json are quantised already, by '{shortened(method)}'; {PLAIN_WEIGHTS}",
            "quantization",
            OWN,
        )
    elif request.mode == "train" and request.training.lora is not None:
        raise RuleError(
            f"adapters on weights that '{shortened(method)}' quantises are not measured; {PLAIN_WEIGHTS}",
            OWN,
            "training.lora",
        )


def _check_training(request: ExplorationRequest, quantized: Quantization) -> None:
    field = OWN if quantized.is_own else "quantization"
    if request.training.lora is None:
        raise RuleError(
            f"weights in {quantized.bits} bits cannot be trained themselves: add training.lora, whose adapters are "
            f"trained in their place; {PLAIN_WEIGHTS}",
            field,
            "training.lora",
        )
    if request.training.precision != "pure":
        raise RuleError(
            "weights beside quantised ones are in float32, as peft prepares them: leave precision out",
            "training.precision",
            field,
        )
    if request.space.highest_sharding is not Sharding.NONE:
        raise RuleError("quantised weights are measured without sharding", field, "training.sharding")
