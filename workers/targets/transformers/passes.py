"""The timed parts of a transformers model: one layer, or the shell, with the settings of a component."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from bexp.explorer.cost.components import BackEnd, BlockRecompute, Component, ComponentKind, marked_values
from bexp.explorer.cost.part_costs import part_of
from bexp.explorer.cost.step import GIB
from bexp.explorer.dimensions.candidate import CHOICES, Candidate
from bexp.explorer.dimensions.dimension import CodePart
from bexp.explorer.dimensions.execution import EXECUTION
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure import host_limits
from bexp.measure.passes import ModulePasses
from bexp.transformers.recompute import OnHost
from bexp.transformers.set_up import Applied, set_up
from bexp.transformers.settings import Float8, Settings
from bexp.workers.instruments.failures import TrialFailedError
from bexp.workers.targets.transformers.layers import BuiltLayer, ShellPart
from bexp.workers.targets.transformers.model import BuildSettings
from bexp.workers.targets.transformers.quantized import scales_of

BY_OPERATION = {
    BlockRecompute.SELECTIVE: "selective",
    BlockRecompute.ACTIVATIONS: "activations",
    BlockRecompute.PROJECTIONS: "projections",
    BlockRecompute.OFFLOAD: Recompute.OFFLOAD,
}
WHOLE_LAYER = {BlockRecompute.FULL: "full", BlockRecompute.TO_THE_END: "groups_1"}
"""What recomputes a layer alone as a whole; a group runs to its end."""


def settings_of(candidate: Candidate, request: ExplorationRequest) -> Settings:
    """What a candidate sets on a whole model."""
    values = {choice.name: getattr(candidate, choice.fields[0]) for choice in CHOICES}
    own = {name: value for name, value in values.items() if value is not None}
    return Settings.of(
        {EXECUTION.name: request.plain_execution} | own,
        attention=candidate.attention_backend,
        experts=candidate.expert_backend,
        recompute=candidate.recompute.value,
        bta_tile=candidate.bta_tile,
        allocator=request.allocator,
        float8=float8_of(request),
    )


def settings_of_component(component: Component, request: ExplorationRequest) -> Settings:
    """What a component sets on the shell or on a layer; recomputation of a layer as a whole is left out."""
    backend = component.backend or BackEnd()
    if component.kind is ComponentKind.SHELL:
        found = marked_values(CodePart.SHELL, (backend.setting or "").split("+"))
        return Settings.of({choice.name: value for choice, value in found if value is not None})
    found = marked_values(CodePart.LAYER, backend.marks)
    stated = {EXECUTION.name: request.plain_execution.captured}
    return Settings.of(
        stated | {choice.name: value for choice, value in found if value is not None},
        attention=component.attention,
        experts=component.experts,
        recompute=BY_OPERATION.get(component.recompute, "none"),
        bta_tile=component.bta_tile,
        float8=float8_of(request),
    )


def float8_of(request: ExplorationRequest) -> Float8 | None:
    """Return the recipe by which linear layers are computed in float8; None if they are not."""
    return cast(Float8 | None, request.training.float8_recipe)


class LayerPasses(ModulePasses):
    """A layer with its captured arguments. `recompute` is a policy that recomputes all of it in backward, or None.

    Its memory is measured without that recomputation, because the composition adds it.
    """

    def __init__(self, part: BuiltLayer, build: BuildSettings, settings: Settings, *, recompute: str | None) -> None:
        self._layer = part.module
        self._applied = set_up(part.module, settings, strict=True)
        self._recomputed: Applied | None = None
        super().__init__(
            _UnderAutocast(part.module, build.autocast(part.device)),
            part.args,
            part.kwargs,
            training=build.training,
            chained=_place(part),
        )
        self._policy = recompute
        if recompute is not None:
            self._recompute()

    def existing_tensors(self) -> list[Tensor]:
        """As of ModulePasses, with the scales of quantised weights."""
        return [*super().existing_tensors(), *scales_of(self._layer)]

    def without_recomputation(self) -> AbstractContextManager[None]:
        """Return a context in which the layer keeps its activations."""
        return self._kept() if self._recomputed is not None else nullcontext()

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that the last forward took for backward."""
        forward = self._layer.forward
        return forward.host_bytes if isinstance(forward, OnHost) else 0

    def restore(self) -> None:
        """Leave the layer as the library has it, without gradients."""
        if self._recomputed is not None:
            self._recomputed.undo()
        self._applied.undo()
        for parameter in self._layer.parameters():
            parameter.grad = None

    @contextmanager
    def _kept(self) -> Iterator[None]:
        assert self._recomputed is not None, "the layer is recomputed"
        self._recomputed.undo()
        try:
            yield
        finally:
            self._recompute()

    def _recompute(self) -> None:
        assert self._policy is not None, "the layer is recomputed"
        self._recomputed = set_up(self._layer, Settings(recompute=self._policy), strict=True)


class ShellPasses(ModulePasses):
    """Everything but the layers; its forward ends in the loss."""

    def __init__(self, part: ShellPart, build: BuildSettings, settings: Settings) -> None:
        self._applied = set_up(part.model, settings)
        self._model = part.model
        super().__init__(_Shell(part), (), training=build.training)

    def existing_tensors(self) -> list[Tensor]:
        """As of ModulePasses, with the scales of quantised weights."""
        return [*super().existing_tensors(), *scales_of(self._model)]

    def restore(self) -> None:
        """Leave the shell as the library has it, without gradients."""
        self._applied.undo()
        for parameter in self.module.parameters():
            parameter.grad = None


class _UnderAutocast(nn.Module):
    """A layer under autocast."""

    def __init__(self, layer: nn.Module, autocast: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.layer = layer
        self._autocast = autocast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output."""
        with self._autocast:
            return self.layer(*args, **kwargs)


class _Shell(nn.Module):
    """The shell as a module of no arguments, with the parameters that are on the device."""

    def __init__(self, part: ShellPart) -> None:
        super().__init__()
        self._part = part  # not a submodule, so that layers elsewhere are not among the parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those outside the layers."""
        inside = {id(p) for layer in self._part.skeleton.layers for p in layer.parameters(recurse)}
        return (p for p in self._part.model.parameters() if id(p) not in inside)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Those outside the layers."""
        inside = {id(b) for layer in self._part.skeleton.layers for b in layer.buffers(recurse)}
        return (b for b in self._part.model.buffers() if id(b) not in inside)

    def train(self, mode: bool = True) -> _Shell:
        """Set the model's mode."""
        self._part.model.train(mode)
        return self

    def forward(self) -> Tensor:
        """Return the loss, a scalar."""
        return self._part.forward()


def _place(part: BuiltLayer) -> int | str | None:
    """The argument that holds the hidden states: its position or its name."""
    for position, value in enumerate(part.args):
        if value is part.hidden:
            return position
    return next((name for name, value in part.kwargs.items() if value is part.hidden), None)


def require_host_memory(passes: LayerPasses, component: Component, model: ExploredModel) -> None:
    """Run a layer forward, and check that the host could hold the activations of all layers.

    Layers of other kinds count in proportion to their expected bytes.

    Raises:
        TrialFailedError: the host could not hold them; the outcome is a lack of memory.
    """
    assert isinstance(model, ModelParts), "this target describes its model by its parts"
    passes.prepare_forward()
    passes.forward()
    taken = passes.host_bytes
    passes.release()
    expected = sum(model.kind(name).saved_bytes_per_token for name in model.layers)
    full = full_host(round(taken * expected / part_of(component, model).saved_bytes_per_token), "the activations need")
    if full is not None:
        raise TrialFailedError(Outcome.OUT_OF_MEMORY, full)


def full_host(num_bytes: int, need: str) -> str | None:
    """Return why `num_bytes` do not fit in the host's memory, in words that begin with `need`; None if they do."""
    release = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.11 has none
    if release is not None and torch.accelerator.is_available():
        release()  # memory that earlier trials pinned
    free = host_limits.available_bytes()
    if num_bytes <= free:
        return None
    return f"{need} {num_bytes / GIB:.2f} GiB of the host's memory, of which {free / GIB:.2f} GiB are free"
