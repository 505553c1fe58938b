"""Back ends that exist to be compared with are explored only if the request names them."""

from __future__ import annotations

from typing import Any

import pytest

from explorer.cost_model.search_space import EmptySpaceError, enumerate_candidates
from explorer.spec.hardware import BackendSupport, DeviceReport
from explorer.spec.request import ExplorationRequest
from tests.explorer.simulator import report

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "vocab_size": 128,
    "seq_length": 16,
    "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 64},
}


def device(*experts: BackendSupport) -> DeviceReport:
    return report().model_copy(update={"expert_backends": experts})


def explored(found: DeviceReport, **changes: Any) -> set[str | None]:
    request = ExplorationRequest.model_validate({"model": MODEL, "micro_batch_size": [1], **changes})
    return {c.expert_backend for c in enumerate_candidates(request, found, request.model).candidates}


LOOP = BackendSupport(name="loop", usable=True)
COMPARED = BackendSupport(name="cublas_grouped", usable=True, only_when_named=True)


def test_a_back_end_for_comparison_is_left_out_unless_it_is_named() -> None:
    found = device(LOOP, COMPARED)
    assert explored(found) == {"loop"}
    assert explored(found, expert_backends=["cublas_grouped"]) == {"cublas_grouped"}
    assert explored(found, expert_backends=["loop", "cublas_grouped"]) == {"loop", "cublas_grouped"}


def test_a_report_that_carries_no_mark_is_explored_as_it_was_recorded() -> None:
    recorded = BackendSupport.model_validate({"name": "cublas_grouped", "usable": True})
    assert explored(device(LOOP, recorded)) == {"loop", "cublas_grouped"}


def test_the_reasons_of_an_empty_space_are_those_of_unusable_back_ends() -> None:
    broken = BackendSupport(name="loop", usable=False, reason="no loop here")
    with pytest.raises(EmptySpaceError, match=r"no usable expert back end on this device \(loop: no loop here\)"):
        explored(device(broken, COMPARED))
