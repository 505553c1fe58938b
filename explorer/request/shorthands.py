"""Shorter ways to write a request, and the fields that they stand for."""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.candidate import CHOICES
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.lengths import expand_lengths
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.trainer_rules import expand_trainer

LISTS = ("recompute", "attention_backends", "expert_backends", *(choice.asked for choice in CHOICES if choice.asked))
"""Fields that are lists of names."""


def expand_names(data: dict[str, Any]) -> dict[str, Any]:
    """Make a list of a name alone, and an optimizer of its name."""
    data = data | {key: [data[key]] for key in LISTS if isinstance(data.get(key), str)}
    training = data.get("training")
    if isinstance(training, dict) and isinstance(name := training.get("optimizer"), str):
        data["training"] = {**training, "optimizer": {"name": name}}
    return data


def expand_query_groups(data: dict[str, Any]) -> dict[str, Any]:
    """Move a list in `model.num_query_groups` to `num_query_groups`; its first entry stays as the model's own.

    Raises RuleError if the request has a list in both places.
    """
    model = data.get("model")
    groups = model.get("num_query_groups") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(groups, list) or not groups:
        return data
    if data.get("num_query_groups") is not None:
        raise RuleError("num_query_groups is given as a list twice", "num_query_groups", "model.num_query_groups")
    return {**data, "model": {**model, "num_query_groups": groups[0]}, "num_query_groups": groups}


def expand_capacity_factors(data: dict[str, Any]) -> dict[str, Any]:
    """Move a list in `model.moe.capacity_factor` to `capacity_factors`; its first entry stays as the model's own.

    Raises RuleError if the request has a list in both places.
    """
    model = data.get("model")
    moe = model.get("moe") if isinstance(model, dict) else None
    factors = moe.get("capacity_factor") if isinstance(moe, dict) else None
    if not isinstance(model, dict) or not isinstance(moe, dict) or not isinstance(factors, list) or not factors:
        return data
    if data.get("capacity_factors") is not None:
        raise RuleError("capacity_factor is given as a list twice", "capacity_factors", "model.moe.capacity_factor")
    own = {**moe, "capacity_factor": factors[0]}
    return {**data, "model": {**model, "moe": own}, "capacity_factors": factors}


def expand_sharding(data: dict[str, Any]) -> dict[str, Any]:
    """Move a list or `explore` in `training.sharding` to `sharding_levels`.

    Anything else stays where it is, so that the field's own rule judges it.

    Raises RuleError if the request has levels in both places.
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

    `explore` stands for all that the request can have: CUDA graphs are for training on one GPU.

    Raises RuleError if the request has executions in both places.
    """
    asked = data.get("execution")
    if not isinstance(asked, list | tuple) and asked != "explore":
        return data
    if data.get("executions") is not None:
        raise RuleError("executions are given twice, in execution and in executions", "executions", "execution")
    rest = {key: value for key, value in data.items() if key != "execution"}
    return {**rest, "executions": _all_executions(data) if asked == "explore" else asked}


def _all_executions(data: dict[str, Any]) -> list[Execution]:
    alone = data.get("num_devices", data.get("num_csx", 1)) in (1, None)
    replayed = alone and data.get("mode", "train") == "train" and data.get("device_kind") != "cpu"
    return [execution for execution in Execution if replayed or not execution.replays]


def expand_parallelism(data: dict[str, Any]) -> dict[str, Any]:
    """Write out `parallelism: explore`, and move `context` and `sharding` to where they are kept.

    Raises RuleError if the request says the same in two places.
    """
    given = data.get("parallelism")
    if given == "explore":
        sizes = ("tensor", "pipeline", "virtual_stages", "expert")
        given = dict.fromkeys((*sizes, "schedule", "expert_mode"), "explore")
        training = data.get("training")
        is_given = data.get("sharding_levels") is not None or (isinstance(training, dict) and "sharding" in training)
        if not is_given and data.get("num_devices", data.get("num_csx", 1)) != 1:
            given["sharding"] = "explore"
    if not isinstance(given, dict):
        return data
    block = dict(given)
    data = {**data, "parallelism": block}
    if (context := block.pop("context", None)) is not None:
        data = _move(
            data, context if isinstance(context, str | list | tuple) else [context], "context_parallel", "sizes"
        )
    if (sharding := block.pop("sharding", None)) is not None:
        if data.get("sharding_levels") is not None:
            raise RuleError(
                "levels of sharding are given twice, in parallelism.sharding and in sharding_levels",
                "parallelism.sharding",
                "sharding_levels",
            )
        data = _move(data, sharding, "training", "sharding")
    return data


def _move(data: dict[str, Any], value: Any, section: str, name: str) -> dict[str, Any]:
    """Set a field that stands for one of `parallelism`."""
    field = "context" if section == "context_parallel" else name
    old = data.get(section)
    if not isinstance(old, dict | None):
        return data
    if name in (old or {}):
        raise RuleError(
            f"{field} is given twice, in parallelism.{field} and in {section}.{name}",
            f"parallelism.{field}",
            f"{section}.{name}",
        )
    return {**data, section: {**(old or {}), name: value}}


def expand_shorthands(data: dict[str, Any]) -> dict[str, Any]:
    """Return a request whose shorter ways to write fields are replaced by those fields.

    Raises RuleError if a field is given in both ways.
    """
    for expand in (
        expand_names,
        expand_parallelism,
        expand_query_groups,
        expand_capacity_factors,
        expand_sharding,
        expand_execution,
        expand_lengths,
        expand_trainer,
    ):
        data = expand(data)
    return data
