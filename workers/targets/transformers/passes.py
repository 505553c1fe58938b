"""The timed parts of a transformers model: one layer, or the shell, with the settings of a component."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from bexp.measure.passes import ModulePasses
from bexp.transformers.offload import OnHost
from bexp.transformers.set_up import Applied, set_up
from bexp.transformers.settings import Settings
from bexp.workers.targets.transformers.layers import BuiltLayer
from bexp.workers.targets.transformers.model import BuildSettings
from bexp.workers.targets.transformers.quantized import scales_of
from bexp.workers.targets.transformers.shell import ShellPart


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
