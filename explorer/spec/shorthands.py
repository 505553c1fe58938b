"""Shorter ways to write a request, and the fields that they stand for."""

from __future__ import annotations

from typing import Any

from explorer.spec.base import RuleError
from explorer.spec.execution import Execution
from explorer.spec.training import Sharding


def expand_query_groups(data: dict[str, Any]) -> dict[str, Any]:
    """Move a list in `model.num_query_groups` to `num_query_groups`; its first entry stays as the model's own.

    Raises:
        RuleError: the request has a list in both places.
    """
    model = data.get("model")
    groups = model.get("num_query_groups") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(groups, list) or not groups:
        return data
    if data.get("num_query_groups") is not None:
        raise RuleError("num_query_groups is given as a list twice", "num_query_groups", "model.num_query_groups")
    return {**data, "model": {**model, "num_query_groups": groups[0]}, "num_query_groups": groups}


def expand_sharding(data: dict[str, Any]) -> dict[str, Any]:
    """Move a list or `explore` in `training.sharding` to `sharding_levels`.

    Anything else stays where it is, so that the field's own rule judges it.

    Raises:
        RuleError: the request has levels in both places.
    """
    training = data.get("training")
    if not isinstance(training, dict):
        return data
    asked = training.get("sharding")
    is_list = isinstance(asked, list | tuple) and bool(asked) and all(level in list(Sharding) for level in asked)
    if not is_list and asked != "explore":
        return data
    if data.get("sharding_levels") is not None:
        raise RuleError(
            "levels of sharding are given twice, in training.sharding and in sharding_levels",
            "sharding_levels",
            "training.sharding",
        )
    rest = {key: value for key, value in training.items() if key != "sharding"}
    return {**data, "training": rest, "sharding_levels": asked}


def expand_execution(data: dict[str, Any]) -> dict[str, Any]:
    """Move a list or `explore` in `execution` to `executions`.

    Raises:
        RuleError: the request has executions in both places.
    """
    asked = data.get("execution")
    if not isinstance(asked, list | tuple) and asked != "explore":
        return data
    if data.get("executions") is not None:
        raise RuleError("executions are given twice, in execution and in executions", "executions", "execution")
    rest = {key: value for key, value in data.items() if key != "execution"}
    return {**rest, "executions": list(Execution) if asked == "explore" else asked}
