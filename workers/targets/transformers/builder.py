"""The parts of a resolved model on a device, one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bexp.explorer.cost.text_batches import TextBatch
from bexp.workers.targets.transformers.batch import make_batch
from bexp.workers.targets.transformers.config import ResolvedConfig, UnsupportedModelError
from bexp.workers.targets.transformers.expert_inputs import ExpertInputs
from bexp.workers.targets.transformers.layers import BuiltLayer
from bexp.workers.targets.transformers.model import BuildSettings, build_model
from bexp.workers.targets.transformers.quantized import held_tensors, storage_bytes
from bexp.workers.targets.transformers.shell import ShellPart
from bexp.workers.targets.transformers.skeleton import Skeleton


class PartsBuilder:
    """Makes layers, shell and whole model for micro-batches of any texts.

    The weights of one layer of each kind and of the shell stay on the device from the first part until `release`: the
    whole model has them too, so that they take no memory from a part that training would leave to it. A part that was
    handed out earlier is of no use once another is asked for. `kinds` names the kind of each layer, in the model's
    order, and `classes` are the layers' classes.
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
        """Random token ids and labels on the device, of these texts or of so many full sequences."""
        return make_batch(self.resolved.config, self._texts(texts), self.device, seed=self.settings.seed)

    def _texts(self, texts: TextBatch | int) -> TextBatch:
        return TextBatch.whole(texts, self.resolved.seq_length) if isinstance(texts, int) else texts

    def layer(self, kind: str, texts: TextBatch | int) -> BuiltLayer:
        """One layer of `kind`, ready to run. KeyError if there is no such kind.

        If it has experts, its hidden states are those of a typical depth of the model. Else they are the embedding's.
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
        """Embedding, norm, head and loss, ready to run."""
        return ShellPart(self.skeleton, self.batch(texts))

    def whole(self) -> Any:
        """The whole model on the device. The parts are dropped first."""
        self.release()
        return build_model(self.resolved, self.settings, self.device)

    def rest(self) -> int:
        """Drops gradients; returns the bytes of the weights that stay on the device."""
        if self._skeleton is None:
            return 0
        for parameter in self._skeleton.model.parameters():
            parameter.grad = None
        return storage_bytes(held_tensors(self._skeleton.model))

    def release(self) -> None:
        """Frees what the builder holds on the device and on the host."""
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
