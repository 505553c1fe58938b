"""The real model with one layer of each kind on the device, which hands every layer its true arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bexp.workers.targets.transformers.config import ResolvedConfig, UnsupportedModelError, quiet_library
from bexp.workers.targets.transformers.kinds import find_layers
from bexp.workers.targets.transformers.model import META, BuildSettings, Construction, build_model


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply `function` to each tensor of `tree`. Tuples, lists and mappings are rebuilt, other objects stay."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(one, function) for one in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(one, function) for one in tree)
    if type(tree) is dict:
        return {name: map_tensors(one, function) for name, one in tree.items()}
    return tree


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor of `tree`, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for one in tree:
            yield from tensors_of(one)
    elif isinstance(tree, Mapping):
        for one in tree.values():
            yield from tensors_of(one)


def copied(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a copy with values of its own; an expanded axis stays expanded, and `requires_grad` is kept."""
    narrow = tensor.detach()
    shape = narrow.shape
    for axis, stride in enumerate(narrow.stride()):
        if stride == 0 and shape[axis] > 1:
            narrow = narrow.narrow(axis, 0, 1)
    moved = narrow.clone() if device is None or device == narrow.device else narrow.to(device, copy=True)
    return moved.expand(shape).requires_grad_(tensor.requires_grad)


def signature(tree: Any) -> Any:
    """Return structure, shapes and dtypes of tensors, which the arguments of layers of one kind share."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), str(tree.dtype))
    if isinstance(tree, (tuple, list)):
        return tuple(signature(one) for one in tree)
    if isinstance(tree, Mapping):
        return tuple((str(name), signature(one)) for name, one in sorted(tree.items(), key=lambda item: str(item[0])))
    return type(tree).__name__


Handler = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class _Reached(Exception):  # noqa: N818 - it ends a forward that has done its work
    """Enough of the layers has run, so that the rest of the model need not run."""


@dataclass(frozen=True)
class LayerCall:
    """A model's call of a layer, with the arguments as the model passes them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        """The hidden states that go in."""
        return hidden_states(self.args, self.kwargs)

    def with_hidden(self, values: Tensor) -> LayerCall:
        """Return the call with other hidden states of the same shape."""
        own = self.hidden
        assert values.shape == own.shape, "hidden states of the same micro-batch size"
        replaced = values.to(own.device, own.dtype).requires_grad_(own.requires_grad)
        args, kwargs = map_tensors((self.args, self.kwargs), lambda tensor: replaced if tensor is own else tensor)
        return LayerCall(args, kwargs)


class Skeleton:
    """A model of which one layer of each kind is real; the others lie on the meta device and are never run.

    `representatives` has for each layer the index of the layer that represents it; `classes` are the layers' classes.
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
        """Return the model with those layers on the device whose place in the order of construction is in `real`.

        Also returns that place for each layer.
        """
        construction = Construction(classes, lambda number: self.device if number in real else META)
        model = build_model(resolved, self.settings, self.device, construction)
        layers = find_layers(model)
        places = {id(module): number for number, module in enumerate(construction.built)}
        if any(id(layer) not in places for layer in layers):
            raise UnsupportedModelError("the layers are copies of one another, not constructed one by one")
        return model, [places[id(layer)] for layer in layers]

    def call(self, batch: Mapping[str, Tensor], index: int) -> LayerCall:
        """Return the model's call of a representative for `batch`. The forward ends there."""
        calls: list[LayerCall] = []

        def taken(at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if at != index:
                return self._outline(at, args, kwargs)
            calls.append(LayerCall(args, kwargs))
            raise _Reached

        self._walk(batch, taken)
        return calls[0]

    def outputs(self, batch: Mapping[str, Tensor]) -> dict[int, Any]:
        """Return the output of each representative for `batch`, by its index.

        The last layer's output has its values. In the others, tensors that the hidden states replace have none.
        Raises UnsupportedModelError if two layers of a kind are called with arguments of different shapes.
        """
        returned: dict[int, Any] = {}
        last = self.representatives[-1]

        def taken(at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            returned[at] = self._output(at, args, kwargs) if at == last else self._outline(at, args, kwargs)
            return returned[at]

        self._walk(batch, taken)
        return returned

    def _walk(self, batch: Mapping[str, Tensor], taken: Handler) -> None:
        """Run forward up to the last layer, or until `taken`, called once for each representative, ends it.

        Raises:
            UnsupportedModelError: a layer is called more than once or never, or two layers of a kind are called with
                arguments of different shapes.
        """
        signatures: dict[int, Any] = {}
        outputs: dict[int, Any] = {}

        def handle(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index in signatures:
                raise UnsupportedModelError(f"layer {index} is called more than once in a forward pass")
            signatures[index] = signature((args, kwargs))
            kind = self.representatives[index]
            if index == kind:
                outputs[kind] = taken(index, args, kwargs)
            elif signatures[index] != signatures[kind]:
                raise UnsupportedModelError(f"layers {kind} and {index} look alike but get arguments of other shapes")
            if len(signatures) == len(self.layers):
                raise _Reached
            return passed_through(outputs[kind], hidden_states(args, kwargs))

        try:
            with self.stubbed(handle):
                self.run(batch)
        except _Reached:
            return
        missing = sorted(set(range(len(self.layers))) - set(signatures))
        raise UnsupportedModelError(f"the model does not call its layer {missing[0]}")

    def run(self, batch: Mapping[str, Tensor]) -> Any:
        """Run the model's own forward, in the precision of the settings."""
        with quiet_library(), torch.set_grad_enabled(self.settings.training), self.settings.autocast(self.device):
            return self.model(**batch, use_cache=False)

    @contextmanager
    def stubbed(self, handle: Handler) -> Iterator[None]:
        """Run `handle(index, args, kwargs)` in place of each layer's forward within the context."""
        try:
            for index, layer in enumerate(self.layers):
                layer.forward = _stub(index, handle)
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def _output(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.layers[index]
        return map_tensors(type(layer).forward(layer, *args, **kwargs), copied)

    def _outline(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of a layer, without memory for the tensors that the hidden states will replace."""
        shape = hidden_states(args, kwargs).shape
        output = self._output(index, args, kwargs)
        return map_tensors(output, lambda tensor: tensor.to("meta") if tensor.shape == shape else tensor)


def hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states among a layer's arguments: by name, else the first floating-point tensor with axes."""
    named = kwargs.get("hidden_states")
    if isinstance(named, Tensor):
        return named
    for tensor in tensors_of((args, dict(kwargs))):
        if tensor.is_floating_point() and tensor.dim() >= 2:
            return tensor
    raise UnsupportedModelError("a layer gets no hidden states")


def passed_through(output: Any, hidden: Tensor) -> Any:
    """Return `output` with `hidden` in place of every tensor of its shape; other tensors go to its device."""

    def replaced(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.shape == hidden.shape:
            return hidden
        return tensor.to(hidden.device)

    return map_tensors(output, replaced)


def _stub(index: int, handle: Handler) -> Callable[..., Any]:
    return lambda *args, **kwargs: handle(index, args, kwargs)
