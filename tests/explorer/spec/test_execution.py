"""A choice of executions in a request."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from explorer.spec.execution import Execution
from explorer.spec.request import ExplorationRequest

CONFIG = {"hf_config": {"model_type": "llama"}, "hf_seq_length": 8}


def build(**fields: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate({**CONFIG, "target": "transformers", **fields})


def test_a_list_or_explore_is_a_choice() -> None:
    both = (Execution.EAGER, Execution.COMPILE)
    assert build(execution=["compile", "eager"]).execution_choices == both
    assert build(execution="explore").execution_choices == both
    assert build(execution="compile").execution_choices == (None,)
    assert [build(execution=asked).compiles for asked in ("eager", "compile", "explore", ["eager"])] == [
        *(False, True, True, False)
    ]


def test_compiled_layers_alone_have_no_policies_by_operation() -> None:
    asked = {fields: build(execution=fields).recompute_policies for fields in ("compile", ("compile",), "explore")}
    assert asked["compile"] == asked[("compile",)]
    assert not any(policy.by_operation for policy in asked["compile"])
    assert any(policy.by_operation for policy in asked["explore"])


@pytest.mark.parametrize(
    "fields",
    [
        {"execution": []},
        {"execution": ["graph"]},
        {"execution": ["eager"], "executions": ["compile"]},
        {"execution": "explore", "target": "bexp"},
        {"execution": "compile", "executions": ["eager", "compile"]},
        {"execution": ["compile"], "recompute": ["none", "activations"]},
    ],
)
def test_a_wrong_choice_names_the_field(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="execution"):
        build(**fields)
