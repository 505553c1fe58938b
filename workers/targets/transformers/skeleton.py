"""The real model with one layer of each kind on the device: it hands every layer its true arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workers.targets.transformers.config import ResolvedConfig, UnsupportedModelError, quiet_library
from workers.targets.transformers.kinds import find_layers
from workers.targets.transformers.model import META, BuildSettings, Construction, build_model
from workers.targets.transformers.trees import copied, map_tensors, signature, tensors_of

HOST = torch.device("cpu")
Handler = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class _EveryLayerCaptured(Exception):  # noqa: N818 - it ends a forward that has done its work
    """Every layer's arguments are known, so that the head need not run."""


@dataclass(frozen=True)
class LayerCall:
    """How a model calls a layer of one kind: its arguments, and the shape of what comes back.

    args, kwargs: as the model passes them, tensors copied at once
    output:       the layer's output, detached
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def hidden(self) -> Tensor:
        """The hidden states that go in."""
        return hidden_states(self.args, self.kwargs)

    def to(self, device: torch.device) -> LayerCall:
        """The same call with copies of its tensors on `device`."""
        args, kwargs, output = map_tensors((self.args, self.kwargs, self.output), lambda tensor: copied(tensor, device))
        return LayerCall(args, kwargs, output)


class Skeleton:
    """A model of which one layer of each kind is real; the others lie on the meta device and are never run.

    `representatives` gives for each layer the index of the layer that stands for it; `classes` are the layers' classes.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        settings: BuildSettings,
        device: torch.device,
        representatives: Sequence[int],
        classes: frozenset[type[nn.Module]],
    ) -> None:
        self.settings = settings
        self.device = device
        self.representatives = tuple(representatives)
        self.model = self._build(resolved, classes)
        self.layers = find_layers(self.model)

    def _build(self, resolved: ResolvedConfig, classes: frozenset[type[nn.Module]]) -> Any:
        """Build the model as if its layers were constructed in their order, and once more if they were not."""
        wanted = set(self.representatives)
        expected = list(range(len(self.representatives)))
        model, numbers = self._construct(resolved, classes, {expected[index] for index in wanted})
        if any(numbers[index] != expected[index] for index in wanted):
            del model
            model, numbers = self._construct(resolved, classes, {numbers[index] for index in wanted})
        layers = find_layers(model)
        for index in set(self.representatives):
            if any(tensor.device.type == "meta" for tensor in [*layers[index].parameters(), *layers[index].buffers()]):
                raise UnsupportedModelError(f"layer {index} holds weights of another layer")
        others = {id(tensor) for layer in layers for tensor in [*layer.parameters(), *layer.buffers()]}
        left = [
            name
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if tensor.device.type == "meta" and id(tensor) not in others
        ]
        if left:
            raise UnsupportedModelError(f"{left[0]} is left on the meta device")
        return model

    def _construct(
        self, resolved: ResolvedConfig, classes: frozenset[type[nn.Module]], real: set[int]
    ) -> tuple[Any, list[int]]:
        """The model with those layers on the device whose place in the order of construction is in `real`.

        Also returns that place for each layer.
        """
        construction = Construction(classes, lambda number: self.device if number in real else META)
        model = build_model(resolved, self.settings, self.device, construction)
        layers = find_layers(model)
        places = {id(module): number for number, module in enumerate(construction.built)}
        if any(id(layer) not in places for layer in layers):
            raise UnsupportedModelError("the layers are copies of one another, not constructed one by one")
        return model, [places[id(layer)] for layer in layers]

    def capture(self, batch: Mapping[str, Tensor], keep_on: torch.device = HOST) -> dict[int, LayerCall]:
        """How the model calls each representative for `batch`, by its index; tensors lie on `keep_on`.

        One forward runs up to the last layer, each representative once. UnsupportedModelError if a layer is called more
        than once or never, or if two layers of a kind are called with arguments of different shapes.
        """
        calls: dict[int, LayerCall] = {}
        signatures: dict[int, Any] = {}

        def handle(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index in signatures:
                raise UnsupportedModelError(f"layer {index} is called more than once in a forward pass")
            signatures[index] = signature((args, kwargs))
            kind = self.representatives[index]
            if index == kind:
                calls[kind] = self._captured(index, args, kwargs, keep_on)
            elif signatures[index] != signatures[kind]:
                raise UnsupportedModelError(f"layers {kind} and {index} look alike but get arguments of other shapes")
            if len(signatures) == len(self.layers):
                raise _EveryLayerCaptured
            return passed_through(calls[kind].output, hidden_states(args, kwargs))

        try:
            with self.stubbed(handle):
                self.run(batch)
        except _EveryLayerCaptured:
            return calls
        missing = sorted(set(range(len(self.layers))) - set(signatures))
        raise UnsupportedModelError(f"the model does not call its layer {missing[0]}")

    def run(self, batch: Mapping[str, Tensor]) -> Any:
        """The model's own forward, in the precision of the settings."""
        with quiet_library(), torch.set_grad_enabled(self.settings.training), self.settings.autocast(self.device):
            return self.model(**batch, use_cache=False)

    @contextmanager
    def stubbed(self, handle: Handler) -> Iterator[None]:
        """Inside the context, `handle(index, args, kwargs)` runs in place of each layer's forward."""
        try:
            for index, layer in enumerate(self.layers):
                layer.forward = _stub(index, handle)
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def _captured(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], keep_on: torch.device) -> LayerCall:
        kept_args, kept_kwargs = map_tensors((args, kwargs), lambda tensor: copied(tensor, keep_on))
        layer = self.layers[index]
        output = type(layer).forward(layer, *args, **kwargs)
        kept_output = map_tensors(output, lambda tensor: copied(tensor, keep_on))
        return LayerCall(kept_args, kept_kwargs, kept_output)


def hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among a layer's arguments: by name, else the first floating-point tensor with axes."""
    named = kwargs.get("hidden_states")
    if isinstance(named, Tensor):
        return named
    for tensor in tensors_of((args, dict(kwargs))):
        if tensor.is_floating_point() and tensor.dim() >= 2:
            return tensor
    raise UnsupportedModelError("a layer gets no hidden states")


def passed_through(output: Any, hidden: Tensor) -> Any:
    """`output` with `hidden` in place of every tensor of its shape; other tensors go to its device."""

    def replaced(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.shape == hidden.shape:
            return hidden
        return tensor.to(hidden.device)

    return map_tensors(output, replaced)


def _stub(index: int, handle: Handler) -> Callable[..., Any]:
    return lambda *args, **kwargs: handle(index, args, kwargs)
