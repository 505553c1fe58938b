"""A whole pass of a tiny model, and its parts, compared with the tensors that cross the borders of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bexp.explorer.cost.text_batches import TextBatch
from bexp.workers.targets.transformers.batch import make_batch
from bexp.workers.targets.transformers.builder import PartsBuilder
from bexp.workers.targets.transformers.config import ResolvedConfig, quiet_library
from bexp.workers.targets.transformers.kinds import kind_names
from bexp.workers.targets.transformers.layers import BuiltLayer, LayerStandIn
from bexp.workers.targets.transformers.model import BuildSettings
from bexp.workers.targets.transformers.results import DifferenceError, require_all_equal, require_equal
from bexp.workers.targets.transformers.skeleton import LayerCall, copied, hidden_states, map_tensors, tensors_of


class _Gate(torch.autograd.Function):
    """A copy that separates the gradients on the two sides of a layer's border."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass
class LayerRecord:
    """A layer's call and its output, with the floating-point tensors that crossed its border."""

    call: LayerCall
    output: Any
    inputs: list[Tensor]
    outputs: list[Tensor]

    @property
    def input_gradients(self) -> tuple[Tensor | None, ...]:
        """A gradient, or None, for each floating-point argument."""
        return tuple(_gradient(tensor) for tensor in self.inputs)

    @property
    def output_gradients(self) -> tuple[Tensor | None, ...]:
        """A gradient, or None, for each floating-point output."""
        return tuple(_gradient(tensor) for tensor in self.outputs)

    def stand_in(self) -> LayerStandIn:
        """Return the replacement of this layer in the shell."""
        return LayerStandIn(self.output, self.input_gradients)


@dataclass
class ReferenceRun:
    """The result of one whole forward and backward pass."""

    loss: Tensor
    logits: Tensor
    records: dict[int, LayerRecord]
    num_calls: list[int]
    """How often each layer was called."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """Copies, by the parameter's id."""


def run_reference(model: Any, layers: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> ReferenceRun:
    """Run `model` forward and backward on `batch`, record every layer's border, and clear the gradients."""
    records: dict[int, LayerRecord] = {}
    num_calls = [0] * len(layers)

    def wrapped(index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            num_calls[index] += 1
            kept_args, kept_kwargs = map_tensors((args, kwargs), copied)
            args, kwargs = map_tensors((args, kwargs), _gated)
            inputs = [tensor for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()]
            output = original(*args, **kwargs)
            kept_output = map_tensors(output, lambda tensor: copied(tensor).detach())
            output = map_tensors(output, _gated)
            outputs = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
            records[index] = LayerRecord(LayerCall(kept_args, kept_kwargs), kept_output, inputs, outputs)
            return output

        return forward

    try:
        for index, layer in enumerate(layers):
            layer.forward = wrapped(index, layer.forward)
        with quiet_library():
            out = model(**batch, use_cache=False)
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
    out.loss.backward()
    return ReferenceRun(out.loss.detach(), out.logits.detach(), records, num_calls, taken_gradients(model))


def run_plain(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the loss of `model` on `batch`, and its gradients by parameter id, which are then cleared."""
    with quiet_library():
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), taken_gradients(model)


def taken_gradients(module: nn.Module) -> dict[int, Tensor]:
    """Take the gradients of a module's parameters away, and return them by the parameter's id."""
    gradients = {}
    for parameter in module.parameters():
        if parameter.grad is not None:
            gradients[id(parameter)] = parameter.grad
            parameter.grad = None
    return gradients


def _gated(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    gated: Tensor = _Gate.apply(tensor)  # type: ignore[no-untyped-call]  # untyped in torch
    gated.retain_grad()
    return gated


def _gradient(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.requires_grad else None


def bytes_saved_by(part: BuiltLayer) -> int:
    """Return the bytes of the storages that one forward of `part` keeps for autograd, without its parameters."""
    parameters = {tensor.untyped_storage().data_ptr() for tensor in part.module.parameters()}
    storages: dict[int, int] = {}
    alive: list[Tensor] = []  # a freed storage's address may come again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = min(storage.nbytes(), tensor.numel() * tensor.element_size())
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        part.forward_all()
    return sum(storages.values())


CPU = torch.device("cpu")


class OtherLayerError(DifferenceError):
    """A layer of the same kind does not represent this one."""


class PartsComparison:
    """The comparison of layers and shell, each built alone, with one whole model on the CPU.

    Attributes:
        kinds: the kind of each layer.
        followed_outputs: by kind, the places of the outputs that get a gradient.
        saved_bytes_per_token: by kind, the bytes that a layer keeps for its backward pass, once layers were replayed.
    """

    def __init__(self, tiny: ResolvedConfig, settings: BuildSettings, model: Any, layers: Sequence[nn.Module]) -> None:
        self.tiny = tiny
        self.settings = settings
        self.model = model
        self.layers = layers
        self.kinds = tuple(kind_names(layers, model.config))
        self.followed_outputs: dict[str, tuple[int, ...]] = {}
        self.saved_bytes_per_token: dict[str, float] = {}
        self._separate = False  # each layer is built on its own, because one does not represent another
        self._runs: dict[TextBatch, ReferenceRun] = {}
        self._layer_gradients: dict[int, dict[int, Tensor]] = {}
        self._builder: PartsBuilder | None = None

    def build_separately(self) -> None:
        """Build each layer on its own from now on."""
        self._separate = True
        self._builder = None

    def reference(self, texts: TextBatch | int) -> ReferenceRun:
        """Return the whole model's pass with a micro-batch of these texts, or of so many full sequences."""
        texts = self._texts(texts)
        if texts not in self._runs:
            self._runs[texts] = run_reference(self.model, self.layers, make_batch(self.tiny.config, texts, CPU))
        return self._runs[texts]

    def _texts(self, texts: TextBatch | int) -> TextBatch:
        return TextBatch.whole(texts, self.tiny.seq_length) if isinstance(texts, int) else texts

    def replay_all(self, texts: TextBatch | int) -> None:
        """Replay every layer alone, and require the same outputs and gradients of arguments and parameters.

        Raises:
            OtherLayerError: a layer differs from the one that represents its kind.
            DifferenceError: any other result differs.
        """
        texts = self._texts(texts)
        run = self.reference(texts)
        builder = self._parts()
        for index, name in enumerate(builder.kinds):
            part = builder.layer(name, texts)
            part.module.load_state_dict(self.layers[index].state_dict())
            record = run.records[index]
            represents_itself = builder.kinds.index(name) == index
            if represents_itself:
                _require_same_arguments(index, part, record)
            try:
                self._replay(index, part, record, run)
            except DifferenceError as error:
                if represents_itself:
                    raise
                raise OtherLayerError(str(error)) from error
            if texts.is_whole:
                kept = bytes_saved_by(part) / texts.positions
                self.saved_bytes_per_token[self.kinds[index]] = kept

    def _replay(self, index: int, part: BuiltLayer, record: LayerRecord, run: ReferenceRun) -> None:
        _take_values(part, record)
        part.clear_gradients()
        output = part.forward_all()
        floating = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
        known = [tensor for tensor in tensors_of(record.output) if tensor.is_floating_point()]
        if len(floating) != len(known):
            raise DifferenceError(f"layer {index}: {len(floating)} outputs instead of {len(known)}")
        names = [f"layer {index}, output {place}" for place in range(len(known))]
        require_all_equal("value", zip(names, floating, known, strict=True))
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(floating, record.output_gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        followed = {id(tensor) for tensor in part.followed(output)}
        if any(id(tensor) not in followed for tensor, _ in pairs):
            raise DifferenceError(f"layer {index}: a gradient comes back to an output that is not the hidden states")
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        arguments = [tensor for tensor in tensors_of((part.args, part.kwargs)) if tensor.is_floating_point()]
        names = [f"layer {index}, argument {place}" for place in range(len(arguments))]
        grads = [tensor.grad for tensor in arguments]
        require_all_equal("gradient", zip(names, grads, record.input_gradients, strict=True))
        gradients = self._layer_gradients.setdefault(index, {})
        gradients.clear()
        for (name, own), parameter in zip(part.module.named_parameters(), self.layers[index].parameters(), strict=True):
            if own.grad is not None:
                gradients[id(parameter)] = own.grad.clone()
            if id(parameter) not in self._shared:
                require_equal(f"gradient of layer {index}, {name}", own.grad, run.gradients.get(id(parameter)))

    @cached_property
    def _shared(self) -> set[int]:
        """Parameters that several layers, or a layer and the shell, hold: their gradients are compared as sums."""
        seen: dict[int, int] = {}
        for layer in self.layers:
            for parameter in layer.parameters():
                seen[id(parameter)] = seen.get(id(parameter), 0) + 1
        return {key for key, count in seen.items() if count > 1}

    def require_shell(self, size: int) -> None:
        """Require that the shell has the model's logits and loss, and that its backward reaches the embedding."""
        self._shell_gradients(self.reference(size), size)
        part = self._parts().shell(size)
        loss = part.forward()
        loss.backward()
        embedding = part.model.get_input_embeddings().weight
        reached = embedding.grad is not None or not embedding.requires_grad
        part.clear_gradients()
        if not bool(torch.isfinite(loss)) or not reached:
            raise DifferenceError("the backward pass does not reach the embedding")

    def _shell_gradients(self, run: ReferenceRun, texts: TextBatch | int) -> dict[int, Tensor]:
        part = self._parts().shell(texts)
        self._copy_shell_weights(part.model)
        part.clear_gradients()
        output = part.forward_with([run.records[index].stand_in() for index in range(len(self.layers))])
        require_equal("logits of the shell", output.logits, run.logits)
        require_equal("loss of the shell", output.loss, run.loss)
        output.loss.backward()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        ours = dict(part.model.named_parameters())
        gradients = {key: ours[name].grad for key, name in names.items() if ours[name].grad is not None}
        part.clear_gradients()
        return gradients

    def _copy_shell_weights(self, model: Any) -> None:
        theirs = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.device.type != "meta":
                    tensor.copy_(theirs[name])

    def require_sum(self, texts: TextBatch | int) -> None:
        """Require that the gradients of layers and shell add up to the model's."""
        run = self.reference(texts)
        self.replay_all(texts)
        total = self._shell_gradients(run, texts)
        for gradients in self._layer_gradients.values():
            for key, gradient in gradients.items():
                total[key] = gradient if key not in total else total[key] + gradient
        triples = ((name, total.get(id(p)), run.gradients.get(id(p))) for name, p in self.model.named_parameters())
        require_all_equal("summed gradient", triples)

    def _parts(self) -> PartsBuilder:
        if self._builder is None:
            kinds = self.kinds
            names = [f"{kind}@{index}" for index, kind in enumerate(kinds)] if self._separate else kinds
            followed = {name: self.followed_outputs[kind] for name, kind in zip(names, kinds, strict=True)}
            classes = frozenset(type(layer) for layer in self.layers)
            self._builder = PartsBuilder(
                self.tiny, names, CPU, self.settings, classes=classes, followed_outputs=followed
            )
        return self._builder


def _require_same_arguments(index: int, part: BuiltLayer, record: LayerRecord) -> None:
    """Require the model's own arguments of the skeleton, except hidden states and what is computed from them."""
    ours = list(tensors_of((part.args, part.kwargs)))
    theirs = list(tensors_of((record.call.args, record.call.kwargs)))
    if len(ours) != len(theirs):
        raise DifferenceError(f"layer {index}: {len(ours)} tensors are handed over instead of {len(theirs)}")
    for place, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        if not expected.requires_grad:
            require_equal(f"argument {place} of layer {index}", actual.double(), expected.double())


def _take_values(part: BuiltLayer, record: LayerRecord) -> None:
    """Replace the skeleton's hidden states, and all that depends on them, by the true ones."""
    if hidden_states(record.call.args, record.call.kwargs).shape != part.hidden.shape:
        raise DifferenceError("the hidden states have another shape")
    with torch.no_grad():
        pairs = zip(
            tensors_of((part.args, part.kwargs)), tensors_of((record.call.args, record.call.kwargs)), strict=True
        )
        for ours, theirs in pairs:
            if theirs.requires_grad:
                ours.requires_grad_(True)
                ours.copy_(theirs)
