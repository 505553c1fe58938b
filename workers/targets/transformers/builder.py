"""The parts of a resolved model on a device, one at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bexp.explorer.cost.text_batches import TextBatch
from bexp.transformers.experts import expert_modules
from bexp.workers.targets.transformers.batch import make_batch
from bexp.workers.targets.transformers.config import ResolvedConfig, UnsupportedModelError
from bexp.workers.targets.transformers.layers import BuiltLayer, ShellPart
from bexp.workers.targets.transformers.model import BuildSettings
from bexp.workers.targets.transformers.quantized import held_tensors, storage_bytes
from bexp.workers.targets.transformers.skeleton import LayerCall, Skeleton, hidden_states, map_tensors, tensors_of


class PartsBuilder:
    """A builder of layers, shell and whole model for micro-batches of any texts.

    The weights of one layer of each kind and of the shell stay on the device from the first part until `release`. They
    take no memory that a part would have in training, because the whole model has them too. A part becomes invalid when
    the next is asked for. `kinds` names the kind of each layer, in the model's order, and `classes` are the layers'
    classes.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        kinds: Sequence[str],
        device: torch.device,
        settings: BuildSettings,
        *,
        classes: frozenset[type[nn.Module]],
        followed_outputs: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.resolved = resolved
        self.kinds = tuple(kinds)
        self.device = device
        self.settings = settings
        self._followed = followed_outputs or {}
        self._classes = classes
        self._skeleton: Skeleton | None = None
        self._expert_inputs: ExpertInputs | None = None

    def batch(self, texts: TextBatch | int) -> dict[str, Tensor]:
        """Return random token ids and labels on the device, of these texts or of so many full sequences."""
        return make_batch(self.resolved.config, self._texts(texts), self.device, seed=self.settings.seed)

    def _texts(self, texts: TextBatch | int) -> TextBatch:
        return TextBatch.whole(texts, self.resolved.seq_length) if isinstance(texts, int) else texts

    def layer(self, kind: str, texts: TextBatch | int) -> BuiltLayer:
        """Return one layer of `kind`, ready to run. Raises KeyError if there is no such kind.

        A layer with experts gets hidden states of a typical depth of the model, any other those of the embedding.
        """
        if kind not in self.kinds:
            raise KeyError(kind)
        index = self.kinds.index(kind)
        call = self.skeleton.call(self.batch(texts), index)
        module = self.skeleton.layers[index]
        return BuiltLayer(
            module, self._inputs.deepened(call, index, self._texts(texts)), self.settings, self._followed.get(kind)
        )

    def shell(self, texts: TextBatch | int) -> ShellPart:
        """Return embedding, norm, head and loss, ready to run."""
        return ShellPart(self.skeleton, self.batch(texts))

    def rest(self) -> int:
        """Drop gradients; return the bytes of the weights that stay on the device."""
        if self._skeleton is None:
            return 0
        for parameter in self._skeleton.model.parameters():
            parameter.grad = None
        return storage_bytes(held_tensors(self._skeleton.model))

    def release(self) -> None:
        """Free the builder's memory on the device and on the host."""
        self._skeleton = None
        self._expert_inputs = None

    @property
    def _inputs(self) -> ExpertInputs:
        if self._expert_inputs is None:
            self._expert_inputs = ExpertInputs(self.skeleton, self._sequence, seq_length=self.resolved.seq_length)
        return self._expert_inputs

    def _sequence(self, number: int) -> dict[str, Tensor]:
        """A micro-batch of one sequence without padding."""
        seed = self.settings.seed + number
        return make_batch(self.resolved.config, self._texts(1), self.device, seed=seed)

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


COMPARED_SEQUENCES = 2
"""How many sequences decide which depth is typical."""
DEEPEST_LAYER = 8
"""Layers from this one on are not considered, which bounds the work for each sequence; loads hardly change so deep."""
MOST_SEQUENCES = 32
"""A larger micro-batch repeats its sequences, because so many are spread over the experts as more would be."""

Visit = Callable[[int, Tensor, Sequence[Tensor]], None]
"""Gets a layer's index, the hidden states that go in, and the experts that each token is sent to."""


class _ExpertsReached(Exception):  # noqa: N818 - it ends a forward that has done its work
    """No deeper layer is wanted."""


class ExpertInputs:
    """Hidden states for the layers with experts of a skeleton.

    `sequence(number)` is a micro-batch of one sequence of `seq_length` tokens. Each goes through the layers alone. Its
    hidden states are kept on the host, so that a part which is measured later has all of the device's memory.
    """

    def __init__(self, skeleton: Skeleton, sequence: Callable[[int], Mapping[str, Tensor]], *, seq_length: int) -> None:
        self._skeleton = skeleton
        self._seq_length = seq_length
        self._sequence = sequence
        self._representatives: dict[int, int] | None = None
        self._known: dict[int, list[Tensor]] = defaultdict(list)

    def deepened(self, call: LayerCall, representative: int, texts: TextBatch) -> LayerCall:
        """Return `call` with hidden states of a typical layer of the representative's kind.

        The typical layer has sorted expert loads that are nearest to the mean over all layers of the kind. `call` stays
        as it is if the layer has no experts with the library's experts interface.
        """
        if not expert_modules(self._skeleton.layers[representative]):
            return call
        if self._representatives is None:
            self._representatives = self._typical_layers()
        if representative not in self._representatives.values():
            return call
        row_sequences = -(-texts.width // self._seq_length)  # a token budget makes rows that are longer than a sequence
        num_sequences = texts.size * row_sequences
        for number in range(len(self._known[representative]), min(num_sequences, MOST_SEQUENCES)):
            self._pass_through(number, self._representatives)
        rows = self._known[representative]
        repeated = [rows[number % len(rows)] for number in range(num_sequences)]
        if not texts.is_whole:
            places = range(0, num_sequences, row_sequences)
            filled = [torch.cat(repeated[at : at + row_sequences], 1).narrow(1, 0, texts.width) for at in places]
            return call.with_hidden(torch.cat(filled).reshape(call.hidden.shape))
        pairs = zip(call.hidden.shape, rows[0].shape, strict=True)
        batch_axis = next((axis for axis, (size, of_one) in enumerate(pairs) if size != of_one), 0)
        return call.with_hidden(torch.cat(repeated, batch_axis))

    def _typical_layers(self) -> dict[int, int]:
        """The representative of each layer whose hidden states are kept."""
        tokens: dict[int, list[Tensor]] = defaultdict(list)

        def count(index: int, _: Tensor, routes: Sequence[Tensor]) -> None:
            tokens[index] += [each.flatten().cpu() for each in routes]

        for number in range(COMPARED_SEQUENCES):
            _walk(self._skeleton, self._sequence(number), count)
        loads = {
            index: torch.bincount(torch.cat(routes)).sort(descending=True).values
            for index, routes in sorted(tokens.items())
            if routes
        }
        by_kind: dict[int, list[int]] = defaultdict(list)
        for index in loads:
            by_kind[self._skeleton.representatives[index]].append(index)
        return {_nearest_to_mean(indices, loads): kind for kind, indices in by_kind.items()}

    def _pass_through(self, number: int, wanted: Mapping[int, int]) -> None:
        deepest = max(wanted)

        def keep(index: int, hidden: Tensor, _: Sequence[Tensor]) -> None:
            if index in wanted:
                self._known[wanted[index]].append(hidden.cpu())
            if index == deepest:
                raise _ExpertsReached

        _walk(self._skeleton, self._sequence(number), keep)


def _nearest_to_mean(indices: Sequence[int], loads: Mapping[int, Tensor]) -> int:
    rows = nn.utils.rnn.pad_sequence([loads[index] for index in indices], batch_first=True).double()
    distances = (rows - rows.mean(0)).abs().sum(1).tolist()
    allowed = [index for index in indices if index < DEEPEST_LAYER] or indices[:1]
    return min(allowed, key=lambda index: distances[indices.index(index)])


def _walk(skeleton: Skeleton, batch: Mapping[str, Tensor], visit: Visit) -> None:
    """Run forward through the layers, each its representative with rotated channels, until `visit` ends it.

    Weights are drawn alike for all channels, so a rotation makes other weights of them. Equal weights in each layer
    would make the tokens alike faster than a model's own layers do.
    """

    @torch.no_grad()
    def handle(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_states(args, kwargs)
        representative = skeleton.representatives[index]
        layer = skeleton.layers[representative]
        shift = 0 if index == representative else index * hidden.shape[-1] // len(skeleton.layers)
        rotated = hidden.roll(shift, -1)
        args, kwargs = map_tensors((args, kwargs), lambda tensor: rotated if tensor is hidden else tensor)
        with _recorded_routes(layer) as routes:
            output = type(layer).forward(layer, *args, **kwargs)
        visit(index, rotated, routes)
        return map_tensors(
            output,
            lambda tensor: (
                tensor.roll(-shift, -1) if tensor.is_floating_point() and tensor.shape == hidden.shape else tensor
            ),
        )

    try:
        with skeleton.stubbed(handle):
            skeleton.run(batch)
    except _ExpertsReached:
        return


@contextmanager
def _recorded_routes(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Record, within the context, the experts that each token of a call of `layer` is sent to."""
    routes: list[Tensor] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        routes.extend([tensor for tensor in tensors_of((args, kwargs)) if not tensor.is_floating_point()][:1])

    hooks = [module.register_forward_pre_hook(record, with_kwargs=True) for module in expert_modules(layer)]
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()
