"""Setting a model up as recommended, and undoing it."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch
from torch import nn

from bexp.allocator import set_allocator
from bexp.explorer.dimensions.context_parallel import ALONE, Sharing
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.measure.host_limits import processor_name
from bexp.trainer.recommended_setup import RecommendationError, RecommendedSetup, Source
from bexp.trainer.trained_weights import differences_of_training, refuse_another_training
from bexp.transformers.context_parallel import set_context_parallel
from bexp.transformers.set_up import Applied, set_up
from bexp.transformers.undo import Changes

_LOGGER = logging.getLogger(__name__)
_APPLIED: weakref.WeakKeyDictionary[nn.Module, Report] = weakref.WeakKeyDictionary()
_UNTOUCHED = "attention, experts, recomputation and loss: as your own code sets them, because that was measured"
_MARK = "_bexp_applied"
"""An attribute of a model that is set up. A deep copy has the attribute, too, and is not in `_APPLIED`."""


@dataclass(frozen=True)
class Report:
    """The result of `apply`: the recommendation, the settings of the model, and warnings for the user."""

    recommendation: RecommendedSetup
    applied: Applied
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Return a line for each thing that was done, and one for each warning."""
        setup = self.recommendation
        lines = [f"micro_batch_size {setup.micro_batch_size} is for the trainer to set (see bexp.training_arguments)"]
        lines += self.applied.done
        lines += [f"allocator: {setup.settings.allocator}"]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def apply(
    model: nn.Module,
    recommendation: Source | RecommendedSetup,
    *,
    seq_length: int | None = None,
    strict: bool = False,
    execution: str | None = None,
    context_parallel: ContextParallel | None = None,
) -> Report:
    """Set a transformers model up as recommended, by the same code that measured it. `restore` undoes it.

    Call this before the model is wrapped (DDP, `fully_shard`, a Trainer) and before CUDA starts, because the allocator
    was measured as well. A model that was set up before is restored first. What was done is logged and returned. If the
    step of a target of your own was measured, only the allocator is set.

    With graphs, the micro-step is captured when it first runs. A micro-step that cannot be captured runs operation by
    operation, and the log says why (see `bexp.graphs.graphed_loss`).

    Args:
        model: the model, not yet wrapped.
        recommendation: a path, a JSON text or a JSON object, as `bexp best ID --json` prints it.
        seq_length: the length of the training sequences, to compare with the measured one.
        strict: raise for another device, version or sequence length, and for weights in a format that needs less memory
            than was measured. Otherwise each of these is a warning.
        execution: `eager`, `compile`, `graph` or `compile+graph`, in place of the recommended one.
        context_parallel: the ranks that share each sequence, and their layout. Each of them gives its model the same
            whole batch, and the model computes its part (`bexp.transformers.context_parallel`).

    Raises:
        RecommendationError: the architecture is another, or the model is a copy of one that was set up, or devices
            shared sequences when it was measured and do not here. Or it has LoRA adapters where all weights were
            measured, the reverse, or weights that need more memory than the measured.
        SettingsError: the model cannot have a setting.
    """
    setup = RecommendedSetup.read(recommendation)
    if execution is not None:
        setup = replace(setup, settings=setup.settings.run_as(execution))
    inner = inner_model(model)
    _refuse_another_architecture(inner, setup)
    refuse_another_training(inner, setup)
    sharing = _refuse_another_sharing(setup, context_parallel)
    restore(inner)
    warnings = [text for text in [set_allocator(setup.settings.allocator)] if text]
    warnings += _differences(setup, seq_length, inner)
    if sharing != setup.sharing:
        warnings.append(f"it was measured with whole sequences, and here {sharing.size} devices share each")
    if _is_compiled(model):
        warnings.append("the model was compiled before it was set up: call bexp.apply first, then torch.compile")
    if strict and warnings:
        raise RecommendationError("; ".join(warnings))
    if setup.own_code and execution is None:
        changes = Changes()
        if context_parallel is not None:
            set_context_parallel(inner, context_parallel, None, changes)
        applied = Applied(setup.settings, (_UNTOUCHED,), changes)
    else:
        applied = set_up(inner, setup.settings, context_parallel=context_parallel)
    report = Report(setup, applied, tuple(warnings))
    _APPLIED[inner] = report
    setattr(inner, _MARK, True)
    for warning in warnings:
        _LOGGER.warning("%s", warning)
    _LOGGER.info("%s", report)
    return report


def restore(model: nn.Module) -> bool:
    """Undo what `apply` set on a model; return false if nothing was set. The allocator's setting stays.

    Raises RecommendationError for a deep copy of a model that was set up. Such a copy trains as the original does, but
    cannot be restored.
    """
    inner = inner_model(model)
    report = _APPLIED.pop(inner, None)
    if report is None:
        if _MARK in vars(inner):
            raise RecommendationError("this is a copy of a model that was set up: copy the model before bexp.apply")
        return False
    report.applied.undo()
    vars(inner).pop(_MARK)
    return True


def applied_to(model: nn.Module) -> Report | None:
    """Return what `apply` did to a model; None if nothing."""
    return _APPLIED.get(inner_model(model))


def device_name() -> str:
    """Return the name of the device that this process would train on, as a worker there names it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{processor_name()} ({torch.get_num_threads()} cores)"


def versions() -> dict[str, str]:
    """Return the versions that a measurement depends on."""
    installed = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        installed["cuda"] = torch.version.cuda
    try:
        installed["transformers"] = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return installed
    return installed


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, a compiled wrapper, or peft's wrapper of a model with adapters."""
    inner = model._modules.get("_orig_mod")  # a compiled wrapper passes attributes on, `config` among them
    if inner is None and not hasattr(model, "config"):
        inner = model._modules.get("module")
    if inner is not None:
        return inner_model(inner)
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def _is_compiled(model: nn.Module) -> bool:
    compiled_in_place = getattr(inner_model(model), "_compiled_call_impl", None) is not None
    return compiled_in_place or any("_orig_mod" in part._modules for part in model.modules())


def _refuse_another_architecture(model: nn.Module, setup: RecommendedSetup) -> None:
    config: Any = getattr(model, "config", None)
    if config is None:
        raise RecommendationError(
            f"{type(model).__name__} is not a transformers model: it has no configuration. If it holds one, as a "
            "LightningModule may, pass that one"
        )
    differing = setup.mismatches(config)
    if differing:
        raise RecommendationError(f"the recommendation is for another model: {'; '.join(differing)}")


def _refuse_another_sharing(setup: RecommendedSetup, context: ContextParallel | None) -> Sharing:
    """Return how devices share sequences here."""
    sharing = ALONE if context is None else Sharing(context.size, context.layout.name)
    if setup.sharing not in (ALONE, sharing):
        raise RecommendationError(
            f"{setup.sharing.size} devices shared each sequence, in layout '{setup.sharing.layout}': hand their group "
            "over as context_parallel"
        )
    return sharing


def _differences(setup: RecommendedSetup, seq_length: int | None, model: nn.Module) -> list[str]:
    """Return, in words, what was different when the recommendation was measured."""
    differences = []
    parameter = next(model.parameters(), None)
    on_accelerator = torch.cuda.is_initialized() or (parameter is not None and parameter.is_cuda)
    # Asking for the device's name starts CUDA, after which the allocator is fixed: only ask if it has started.
    if setup.device_name and on_accelerator and device_name() != setup.device_name:
        differences.append(f"it was measured on {setup.device_name}, but this is {device_name()}")
    if setup.seq_length and seq_length and seq_length != setup.seq_length:
        differences.append(f"it was measured with sequences of {setup.seq_length} tokens, not {seq_length}")
    differences += differences_of_training(model, setup)
    here = versions()
    differences += [
        f"it was measured with {name} {version}, and this is {here[name]}"
        for name, version in setup.versions.items()
        if name in here and here[name] != version
    ]
    return differences
