"""The largest part of the memory at a step's peak, with its tensors and what holds them."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.composition import Composition, predict_component_table
from bexp.explorer.cost.peak_memory import PeakContent, PeakMemory, peak_memory
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.parts import ExploredModel, LayerPart, Part
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.cost.described import candidate, part, parts
from tests.explorer.shapes import shapes

WIDE: dict[str, Any] = shapes(2, 64, 128, heads=4, vocab=152_064, length=512)
DEEP: dict[str, Any] = shapes(24, 1024, 4096, heads=16, vocab=1000, length=512)
PLAIN = {"micro_batch_size": 8, "recompute": "none", "attention_backend": "flash", "num_query_groups": 16}


def at_peak(request: dict[str, Any], chosen: Candidate, model: ExploredModel | None = None) -> PeakMemory:
    asked = ExplorationRequest.model_validate({"batch_size": 64, **request})
    explored = asked.shapes if model is None else model
    assert explored is not None
    table = Composition([chosen], explored, asked)
    found = peak_memory(table, 0, predict_component_table(table))
    saved, transient = table.activation_bytes(*predict_component_table(table))
    assert sum(found.parts.values()) == pytest.approx(float(table.static_bytes_C[0] + saved[0] + transient[0]))
    assert found.parts[found.largest] == max(found.parts.values())
    return found


@pytest.mark.parametrize(
    ("model", "training", "chosen", "largest", "tensors"),
    [
        (WIDE, {"loss": {"kind": "full"}}, {}, "logits", "8 x 512 x 152,064 in float32 = 2.3 GiB, held by loss=full"),
        (WIDE, {"loss": {"kind": "full"}}, {"micro_batch_size": 1}, "logits", "1 x 512 x 152,064 in float32 = 297.0"),
        (WIDE, {}, {}, "buffers of the step", "8 x 512 tokens"),
        (DEEP, {}, {}, "saved activations", "8 x 512 tokens in 24 layers, kept by recompute=none"),
        (DEEP, {}, {"recompute": "full", "micro_batch_size": 1}, "optimizer states", "held by optimizer=adamw"),
        (
            DEEP,
            {"optimizer": {"name": "sgd", "master_dtype": None}},
            {"recompute": "full", "micro_batch_size": 1},
            "weights",
            "parameters",
        ),
    ],
)
def test_the_largest_part_is_named_with_its_tensors(
    model: dict[str, Any], training: dict[str, Any], chosen: dict[str, Any], largest: str, tensors: str
) -> None:
    found = at_peak({"model": model, "training": training}, Candidate.model_validate({**PLAIN, **chosen}))
    assert found.largest == largest
    assert tensors in found.tensors
    assert found.describe().startswith(f"{largest} with ")


@pytest.mark.parametrize(("loss", "is_held"), [("library", True), ("chunked", False), ("liger", False)])
def test_the_loss_of_a_models_own_code_holds_its_logits_or_not(loss: str, is_held: bool) -> None:
    wide = Part(**part(64_000_000, saved_bytes_per_token=4e6, transient_bytes_per_token=8e6))
    described = parts(shell=wide, logits_per_token=1_000_000)
    found = at_peak({"model": WIDE}, candidate(loss=loss), described)
    assert (PeakContent.LOGITS in found.parts) is is_held
    if is_held:
        assert found.is_wall
        assert found.tensors == "4 x 32 x 1,000,000 in float32 = 488.3 MiB, held by loss=library"
        unknown = at_peak({"model": WIDE}, candidate(loss=loss), parts(shell=wide))
        assert unknown.tensors == "4 x 32 tokens, held by loss=library"


def test_logits_that_are_gone_at_the_peak_are_not_named() -> None:
    kinds = tuple(
        LayerPart.model_validate({**kind.model_dump(), "transient_bytes_per_token": 1e6}) for kind in parts().kinds
    )
    found = at_peak({"model": WIDE}, candidate(), parts(kinds=kinds))
    assert (found.largest, found.is_wall) == (PeakContent.BUFFERS, True)


def test_logits_of_inference_are_named() -> None:
    found = at_peak(
        {"model": WIDE, "mode": "eval", "training": {"loss": {"kind": "full"}}}, Candidate.model_validate(PLAIN)
    )
    assert found.largest is PeakContent.LOGITS
