"""Rules about how a device runs the layers: execution, kernels, and what is recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.dimensions.recompute import Recompute, refuse_number
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.explorer.model.training import Sharding

if TYPE_CHECKING:
    from bexp.explorer.request.request import ExplorationRequest


def check_kernels(request: ExplorationRequest) -> None:
    """Some execution takes the kernels."""
    if request.kernels == (Kernels.LIGER,) and request.space.always_compiles:
        raise RuleError(
            f"kernels '{Kernels.LIGER}' need execution 'eager' or 'graph': the compiler makes kernels of its own from "
            "the same operations",
            "kernels",
            "execution",
        )


def check_executions(request: ExplorationRequest) -> None:
    """An execution is either given or chosen, and the target and the device have it."""
    if request.executions is not None and request.execution not in (None, Execution.EAGER):
        message = "executions take the place of execution: give one of them"
        raise RuleError(message, "executions", "execution")
    field = "execution" if request.executions is None else "executions"
    if request.executions is not None and request.is_own_code:
        message = f"a choice of executions needs target '{TRANSFORMERS}' or '{BEXP}'"
        raise RuleError(message, field, "target")
    if not request.space.replays:
        return
    refused = (
        (request.is_own_code, "target", f"target '{TRANSFORMERS}' or '{BEXP}'"),
        (request.mode != "train", "mode", "mode 'train'"),
        (request.device_kind == "cpu", "device_kind", "a GPU; a CPU has 'eager' and 'compile'"),
        (
            request.num_devices > 1,
            "num_devices",
            "num_devices 1, because gradients are not exchanged within a graph; several devices have 'eager' and "
            "'compile'",
        ),
    )
    graphs = next(execution for execution in request.space.executions if execution.replays)
    for wrong, other, needed in refused:
        if wrong:
            raise RuleError(f"execution '{graphs}' needs {needed}", field, other)


def check_policies(request: ExplorationRequest) -> None:
    """Each recomputation policy is one that the model and the execution have."""
    for policy in request.recompute or ():
        if policy is Recompute.EXPERTS and not request.explored.may_have_experts:
            raise RuleError("recompute 'experts' given for a model without experts", "recompute")
        if policy.by_operation and request.space.always_compiles:
            raise RuleError(
                f"recompute '{policy}' needs execution 'eager' or 'graph': within a graph, the compiler chooses which "
                "operations to run again",
                "recompute",
                "execution",
            )


def check_offload(request: ExplorationRequest) -> None:
    """Activations go to the host in the layers of a transformers model on one GPU, operation by operation."""
    if Recompute.OFFLOAD not in (request.recompute or ()):
        return
    policy = f"recompute '{Recompute.OFFLOAD}'"
    refused = (
        (request.target_name != TRANSFORMERS, "target", f"target '{TRANSFORMERS}'"),
        (request.device_kind == "cpu", "device_kind", "a GPU: on a CPU, activations lie in the host's memory already"),
        (request.num_devices > 1, "num_devices", "num_devices 1: it is measured with the host's memory for itself"),
    )
    for wrong, other, needed in refused:
        if wrong:
            raise RuleError(f"{policy} needs {needed}", "recompute", other)
    if request.mode == "train" and Execution.EAGER not in request.space.executions:
        field = "execution" if request.executions is None else "executions"
        raise RuleError(f"{policy} needs execution 'eager'", "recompute", field)


def check_numbered_policies(request: ExplorationRequest) -> None:
    """A policy names as many layers as there are; groups need whole parameters."""
    for policy in request.recompute or ():
        if not policy.is_numbered:
            continue
        if request.model is not None:
            try:
                refuse_number(policy, request.model.num_layers)
            except ValueError as error:
                raise RuleError(str(error), "recompute", "model.num_layers") from error
        if policy.group_size is not None and request.space.always_compiles and request.target_name == TRANSFORMERS:
            raise RuleError(f"recompute '{policy}' needs execution 'eager' in a transformers model", "recompute")
        level = request.space.highest_sharding
        if policy.group_size is not None and level.level > Sharding.ZERO1.level:
            raise RuleError(
                f"recompute '{policy}' needs whole parameters and gradients on each device (sharding none or zero1): "
                f"with '{level}', layers that run again would gather them once more",
                "recompute",
                "training.sharding",
            )


def check_policies_of_mode(request: ExplorationRequest) -> None:
    """Eval mode recomputes nothing, because it has no backward pass."""
    if request.mode == "eval" and not request.space.recompute_policies:
        message = "recompute must allow 'none' in eval mode: nothing is recomputed without a backward pass"
        raise RuleError(message, "recompute", "mode")
