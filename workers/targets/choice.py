"""The target that a request asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from bexp.explorer.model.target import BEXP, LOCAL, TRANSFORMERS, describe_target, name_local_target
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.timing import collector_off
from bexp.targets.registry import installed_targets, registered_targets
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.settings import read_settings
from bexp.workers.targets.custom.command import CommandProcess
from bexp.workers.targets.custom.target import CustomTarget, TargetSource
from bexp.workers.targets.custom.training_command import SUFFIX, TrainingCommand
from bexp.workers.targets.extensions import EXTENSIONS
from bexp.workers.targets.target import ProfiledTarget, WholeTarget

_NEEDED_BY = {
    BEXP: ("bexp.workers.targets.reference.target", "torch._dynamo"),
    TRANSFORMERS: (
        "transformers.modeling_layers",
        "transformers.models.auto.modeling_auto",
        "bexp.workers.targets.transformers.target",
    ),
}
"""The modules of our targets. The process of somebody else's target imports its own.

Otherwise the first embedding would import `torch._dynamo` amid a trial, and each collection before a timing would then
visit its objects for 0.1 s.
"""
_NEEDED_ON_GPUS = (("torch._inductor.compile_fx",), ("liger_kernel.transformers.monkey_patch",))
"""The modules of compiled candidates and of those with liger's kernels. Both are explored on GPUs by default."""


def open_target(request: ExplorationRequest, instruments: Instruments) -> ProfiledTarget | WholeTarget:
    """Open the request's target on the device of `instruments`.

    Raises:
        UnsupportedTrialError: this worker has no such target, or the target refuses the model; the message says why.
    """
    name = request.target_name
    if name == BEXP:
        from bexp.workers.targets.reference.target import ReferenceTarget  # noqa: PLC0415 - brings the kernels

        return ReferenceTarget(request, instruments)
    if name == TRANSFORMERS:
        from bexp.workers.targets.transformers.target import TransformersTarget  # noqa: PLC0415 - optional library

        return TransformersTarget(request, instruments)
    source, device = find_source(name), str(instruments.device)
    if source.reference.endswith(SUFFIX):
        command = TrainingCommand.read(Path(source.reference.rpartition(":")[0]))
        return CustomTarget(source, request, device, start=partial(CommandProcess, command))
    return CustomTarget(source, request, device)


def target_imports() -> Iterator[Callable[[], None]]:
    """Yield the imports that a job may need. Each takes up to seconds the first time."""
    for name in _NEEDED_BY:
        yield partial(import_target, name)
    for modules in _NEEDED_ON_GPUS if torch.version.cuda is not None else ():
        yield partial(_import_all, modules)


def import_target(name: str) -> None:
    """Import the modules that a job of the target called `name` needs.

    Nothing happens where a library is missing or broken in any way, because the job itself says so.
    """
    _import_all((*_NEEDED_BY.get(name, ()), *EXTENSIONS))


def _import_all(modules: Iterable[str]) -> None:
    with suppress(Exception), collector_off():  # collections would visit all objects
        for module in modules:
            import_module(module)


def find_source(name: str) -> TargetSource:
    """Return the source of a target that is not ours: the file that a person named, or an installed package.

    Raises:
        UnsupportedTrialError: this worker has no such target.
    """
    local = read_settings().local_target
    if local is not None and name in {LOCAL, name_local_target(local)}:
        return TargetSource.of_file(name, local)
    point = registered_targets().get(name)
    if point is None:
        has = ", ".join(describe_target(*item) for item in installed_targets().items())
        raise UnsupportedTrialError(f"this worker has no target '{name}'; it has {has}")
    return TargetSource(name, installed_targets()[name], point.value)
