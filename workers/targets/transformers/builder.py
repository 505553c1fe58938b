"""The parts of a resolved model on a device, one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workers.targets.transformers.batch import Padding, make_batch
from workers.targets.transformers.config import ResolvedConfig, UnsupportedModelError
from workers.targets.transformers.layers import LayerPart
from workers.targets.transformers.model import BuildSettings, build_model
from workers.targets.transformers.shell import ShellPart
from workers.targets.transformers.skeleton import HOST, LayerCall, Skeleton

_NOTHING = -1  # no layer's index


class PartsBuilder:
    """Makes layers, shell and whole model for micro-batches of any size.

    One layer of each kind and the shell exist at a time; those that are not asked for wait in the host's memory, so
    that a part is alone on its device. A part that was handed out earlier is of no use once another is asked for.
    `kinds` names the kind of each layer, in the model's order.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        kinds: Sequence[str],
        device: torch.device,
        settings: BuildSettings,
        *,
        padding: Padding = "none",
        followed_outputs: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.resolved = resolved
        self.kinds = tuple(kinds)
        self.device = device
        self.settings = settings
        self.padding = padding
        self._followed = followed_outputs or {}
        self._skeleton: Skeleton | None = None
        self._calls: dict[int, dict[int, LayerCall]] = {}

    def batch(self, micro_batch_size: int) -> dict[str, Tensor]:
        """Random token ids and labels on the device, and an attention mask if the builder pads."""
        length = self.resolved.seq_length
        return make_batch(
            self.resolved.config, micro_batch_size, length, self.device, padding=self.padding, seed=self.settings.seed
        )

    def layer(self, kind: str, micro_batch_size: int) -> LayerPart:
        """One layer of `kind`, ready to run. KeyError if there is no such kind."""
        if kind not in self.kinds:
            raise KeyError(kind)
        index = self.kinds.index(kind)
        call = self._calls_for(micro_batch_size)[index]
        self._leave_on_device(index)
        module = self.skeleton.layers[index]
        return LayerPart(module, call.to(self.device), self.settings, self._followed.get(kind))

    def shell(self, micro_batch_size: int) -> ShellPart:
        """Embedding, norm, head and loss, ready to run."""
        calls = self._calls_for(micro_batch_size)
        self._leave_on_device(None)
        return ShellPart(self.skeleton, self.batch(micro_batch_size), calls)

    def whole(self) -> Any:
        """The whole model on the device. The parts are dropped first."""
        self.release()
        return build_model(self.resolved, self.settings, self.device)

    def park(self) -> None:
        """Leaves nothing on the device; the parts wait in the host's memory."""
        if self._skeleton is not None:
            self._leave_on_device(_NOTHING)

    def release(self) -> None:
        """Frees what the builder holds on the device and on the host."""
        self._skeleton = None
        self._calls.clear()

    @property
    def skeleton(self) -> Skeleton:
        """The model that the parts belong to, built at first use."""
        if self._skeleton is None:
            representatives = [self.kinds.index(kind) for kind in self.kinds]
            self._skeleton = Skeleton(self.resolved, self.settings, self.device, representatives)
            if len(self._skeleton.layers) != len(self.kinds):
                raise UnsupportedModelError(
                    f"{len(self._skeleton.layers)} layers were built, {len(self.kinds)} expected"
                )
        return self._skeleton

    def _calls_for(self, micro_batch_size: int) -> dict[int, LayerCall]:
        """The captured calls for one micro-batch; only the latest are kept, since their tensors are large."""
        if micro_batch_size not in self._calls:
            self._calls.clear()
            skeleton = self.skeleton
            _move_all(skeleton, self.device)
            self._calls[micro_batch_size] = skeleton.capture(self.batch(micro_batch_size))
        return self._calls[micro_batch_size]

    def _leave_on_device(self, wanted: int | None) -> None:
        """Moves the layer `wanted` to the device and everything else to the host; None means the shell."""
        skeleton = self.skeleton
        for index in set(skeleton.representatives):
            skeleton.layers[index].to(self.device if index == wanted else HOST)
        _move_shell(skeleton, self.device if wanted is None else HOST)


def _move_all(skeleton: Skeleton, device: torch.device) -> None:
    for index in set(skeleton.representatives):
        skeleton.layers[index].to(device)
    _move_shell(skeleton, device)


def _move_shell(skeleton: Skeleton, device: torch.device) -> None:
    """Moves what is outside the layers. Their modules keep their identity, so tied weights stay tied."""
    in_layers = {id(module) for layer in skeleton.layers for module in layer.modules()}
    for module in skeleton.model.modules():
        if id(module) not in in_layers:
            _move_own(module, device)


def _move_own(module: nn.Module, device: torch.device) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
        if parameter.grad is not None:
            parameter.grad = None
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = buffer.to(device)
