"""The parts of a resolved model on a device, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    `kinds` names the kind of each layer, in the model's order, and `classes` are the layers' classes.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        kinds: Sequence[str],
        device: torch.device,
        settings: BuildSettings,
        *,
        classes: frozenset[type[nn.Module]],
        padding: Padding = "none",
        followed_outputs: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.resolved = resolved
        self.kinds = tuple(kinds)
        self.device = device
        self.settings = settings
        self.padding = padding
        self._followed = followed_outputs or {}
        self._classes = classes
        self._skeleton: Skeleton | None = None
        self._weights = _HostWeights()
        self._calls: dict[int, dict[int, LayerCall]] = {}

    def batch(self, micro_batch_size: int) -> dict[str, Tensor]:
        """Random token ids and labels on the device, and an attention mask if the builder pads."""
        length = self.resolved.seq_length
        return make_batch(
            self.resolved.config, micro_batch_size, length, self.device, padding=self.padding, seed=self.settings.seed
        )

    def pad(self, padding: Padding) -> None:
        """Pad the batches of all parts that are handed out from now on."""
        self.padding = padding
        self._calls.clear()

    def layer(self, kind: str, micro_batch_size: int, *, alone: bool = True) -> LayerPart:
        """One layer of `kind`, ready to run. KeyError if there is no such kind.

        The other parts leave the device unless `alone` is false.
        """
        if kind not in self.kinds:
            raise KeyError(kind)
        index = self.kinds.index(kind)
        call = self._calls_for(micro_batch_size)[index]
        if alone:
            self._leave_on_device(index)
        else:
            self._weights.move(self.skeleton.layers[index].modules(), self.device)
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
        self._weights = _HostWeights()
        self._calls.clear()

    @property
    def skeleton(self) -> Skeleton:
        """The model that the parts belong to, built at first use."""
        if self._skeleton is None:
            representatives = [self.kinds.index(kind) for kind in self.kinds]
            self._skeleton = Skeleton(self.resolved, self.settings, self.device, representatives, self._classes)
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
            for index in set(skeleton.representatives):
                self._weights.move(skeleton.layers[index].modules(), self.device)
            self._weights.move(_shell_modules(skeleton), self.device)
            self._calls[micro_batch_size] = skeleton.capture(self.batch(micro_batch_size))
        return self._calls[micro_batch_size]

    def _leave_on_device(self, wanted: int | None) -> None:
        """Moves the layer `wanted` to the device and everything else to the host; None means the shell."""
        skeleton = self.skeleton
        for index in set(skeleton.representatives):
            self._weights.move(skeleton.layers[index].modules(), self.device if index == wanted else HOST)
        self._weights.move(_shell_modules(skeleton), self.device if wanted is None else HOST)


class _HostWeights:
    """Moves modules between the device and the host. Parameters and modules keep their identity, so ties hold.

    The host's copy of a parameter stays while the parameter is on the device, so that only the way to the device costs
    time. What a step has changed on the device is lost on the way back: the weights are random either way.
    """

    def __init__(self) -> None:
        self._host: dict[int, Tensor] = {}

    def move(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        """Move the parameters and buffers of each module, without those of its children, and drop the gradients."""
        for module in modules:
            for parameter in module.parameters(recurse=False):
                self._move(parameter, device)
                parameter.grad = None
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)

    def _move(self, parameter: nn.Parameter, device: torch.device) -> None:
        if parameter.device.type == device.type:
            return
        if device != HOST:
            self._host[id(parameter)] = parameter.data
            parameter.data = parameter.data.to(device)
            return
        kept = self._host.get(id(parameter))
        alike = kept is not None and (kept.shape, kept.stride(), kept.dtype) == (
            parameter.shape,
            parameter.stride(),
            parameter.dtype,
        )
        parameter.data = kept if kept is not None and alike else parameter.data.to(device)


def _shell_modules(skeleton: Skeleton) -> Iterator[nn.Module]:
    """The modules outside the layers."""
    in_layers = {id(module) for layer in skeleton.layers for module in layer.modules()}
    return (module for module in skeleton.model.modules() if id(module) not in in_layers)
