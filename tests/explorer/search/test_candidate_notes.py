"""What a recommendation says of the host's memory and of float8."""

from __future__ import annotations

from typing import Any

from bexp.explorer.model.parts import Float8Layers
from bexp.explorer.search.candidate_report import candidate_notes
from tests.explorer.cost.described import candidate, device, request

OWN = {"target": "transformers", "model": None, "hf_config": {"model_type": "llama"}, "hf_seq_length": 32}


def notes(training: dict[str, Any] | None = None, recompute: str = "none", **parts: Any) -> str:
    asked = request(**OWN, training=training or {}, recompute=["none", "offload"])
    return "\n".join(map(str, candidate_notes(asked, candidate(recompute=recompute), device(**parts), None)))


def test_activations_on_the_host_are_stated_with_their_size() -> None:
    assert "host" not in notes()
    assert "recompute 'offload' is left out: no room" in notes(unavailable={"offload": "no room", "groups_2": "other"})
    layer = 4 * 32 * 640  # bytes that each of six layers keeps
    found = notes(recompute="offload")
    assert f"activations: about {6 * layer / 2**30:.1f} GiB of the host's memory, pinned" in found


def test_an_optimizer_on_the_host_is_stated_with_the_way_to_give_it_to_a_trainer() -> None:
    found = notes({"optimizer": {"name": "adamw_cpu_offload"}}, optimizer_host_bytes=3 << 30)
    assert "optimizer: 3.0 GiB of the host's memory" in found
    assert "optimizer_cls_and_kwargs=(torchao.optim.CPUOffloadOptimizer" in found


def test_float8_states_its_error_and_what_stays_in_bfloat16() -> None:
    found = notes(
        {"precision": "float8_rowwise"}, float8=Float8Layers(num_linear=8, output_error=0.031, gradient_error=0.0567)
    )
    assert "float8 (rowwise): 8 linear layers of decoder layers; experts stay in bfloat16" in found
    assert "off by 3.1% of its norm in bfloat16, and its gradients by 5.7%" in found


def test_a_paged_optimizer_is_stated_to_be_counted_on_the_device() -> None:
    assert "its pages are counted on the device" in notes({"optimizer": {"name": "paged_adamw_8bit"}})
    assert "pages" not in notes({"optimizer": {"name": "adamw_bnb_8bit"}})
