"""Whether a model's parts compute what the model computes, on a tiny model of the same type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from workers.targets.transformers.batch import Padding, make_batch
from workers.targets.transformers.builder import PartsBuilder
from workers.targets.transformers.comparison import DifferenceError, require_all_equal, require_equal
from workers.targets.transformers.config import ResolvedConfig, one_line, quiet_library
from workers.targets.transformers.feature_checks import (
    check_batch_tiles,
    check_checkpointing,
    check_experts_interface,
    check_layer_groups,
)
from workers.targets.transformers.kinds import find_layers, kind_names
from workers.targets.transformers.layers import LayerPart
from workers.targets.transformers.model import BuildSettings, build_model
from workers.targets.transformers.reference_run import LayerRecord, ReferenceRun, run_reference, taken_gradients
from workers.targets.transformers.saved_bytes import bytes_saved_by
from workers.targets.transformers.skeleton import hidden_states
from workers.targets.transformers.trees import tensors_of

CPU = torch.device("cpu")
PARTS = ("runs", "layers", "layer_replay", "shell", "sum_of_parts")  # what measuring by parts needs
FEATURES = (*PARTS, "uniform_layers", "padded_text", "checkpointing", "batch_tiles", "experts_interface")
_SETTINGS = BuildSettings(precision="pure", dtype=torch.float32)
_SIZES = (1, 2)


@dataclass
class SelfCheck:
    """What a tiny model of a type can and cannot do.

    failures:             why a feature is missing; a feature that is not named works
    saved_bytes_per_token: by kind, what the tiny layer keeps for its backward pass (float32)
    hidden_per_token:     numbers in the hidden states of one token at a layer's border
    followed_outputs:     by kind, the places of the outputs that get a gradient (among the floating-point ones)
    """

    failures: dict[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    saved_bytes_per_token: dict[str, float] = field(default_factory=dict)
    hidden_per_token: int = 0
    followed_outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def by_parts(self) -> bool:
        """Whether the model can be measured by parts."""
        return not any(name in self.failures for name in PARTS)

    @property
    def runs(self) -> bool:
        """Whether the whole model trains at all."""
        return "runs" not in self.failures


def self_check(tiny: ResolvedConfig, prepare: Callable[[Any], None] | None = None) -> SelfCheck:
    """Checks every feature on `tiny`, a small configuration, in float32 on the CPU.

    `prepare` changes each model once it is built, as in `BuildSettings`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for one another
    try:
        with quiet_library():
            return _Check(tiny, replace(_SETTINGS, prepare=prepare)).result()
    finally:
        torch.set_num_threads(threads)


def find_group_problem(tiny: ResolvedConfig, prepare: Callable[[Any], None] | None = None) -> str | None:
    """Return why groups of layers of `tiny` cannot be recomputed as one on the CPU; null if they can."""
    try:
        with quiet_library():
            model = build_model(tiny, replace(_SETTINGS, prepare=prepare), CPU)
            check_layer_groups(model, make_batch(tiny.config, 2, tiny.seq_length, CPU))
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises is the reason
        return one_line(error)
    return None


class _OtherLayerError(DifferenceError):
    """A layer of the same kind does not stand for this one."""


class _Check:
    def __init__(self, tiny: ResolvedConfig, settings: BuildSettings) -> None:
        self.tiny = tiny
        self.settings = settings
        self.found = SelfCheck()
        self.model: Any = None
        self.layers: list[nn.Module] = []
        self.runs: dict[tuple[int, Padding], ReferenceRun] = {}
        self.layer_gradients: dict[int, dict[int, Tensor]] = {}
        self.builder: Any = None
        self.separate = False  # each layer is built on its own, since one does not stand for another

    def result(self) -> SelfCheck:
        """Runs the checks in order; one that fails is noted, and those that need it fail with it."""
        self._try("runs", self._check_whole)
        self._try("layers", self._check_layers, needs=("runs",))
        self._try("layer_replay", self._check_replay, needs=("runs", "layers"))
        self._try("shell", self._check_shell, needs=("runs", "layers"))
        self._try("sum_of_parts", self._check_sum, needs=("layer_replay", "shell"))
        self._try("padded_text", self._check_padded, needs=("layer_replay", "shell"))
        needed = ("runs", "layers")
        self._try("checkpointing", lambda: check_checkpointing(self.model, self.layers, self._batch(2)), needed)
        self._try("batch_tiles", lambda: check_batch_tiles(self.model, self.layers, self._batches(2)), needed)
        self._try(
            "experts_interface",
            lambda: check_experts_interface(self.tiny, self.settings, self.model, self._batch(2)),
            needs=("runs",),
        )
        return self.found

    def _try(self, name: str, check: Callable[[], None], needs: tuple[str, ...] = ()) -> None:
        missing = [one for one in needs if one in self.found.failures]
        if missing:
            self.found.failures[name] = f"needs {missing[0]}"
            return
        try:
            check()
        except DifferenceError as error:
            self.found.failures[name] = str(error)
        except Exception as error:  # noqa: BLE001 - whatever a model's code raises is the reason
            self.found.failures[name] = one_line(error)

    def _batch(self, size: int, padding: Padding = "none") -> dict[str, Tensor]:
        return make_batch(self.tiny.config, size, self.tiny.seq_length, CPU, padding=padding)

    def _batches(self, size: int) -> list[dict[str, Tensor]]:
        """Without padding and, where the model takes it, with."""
        whole = [self._batch(size)]
        return whole if "padded_text" in self.found.failures else [*whole, self._batch(size, "left")]

    def _check_whole(self) -> None:
        self.model = build_model(self.tiny, self.settings, CPU)
        if not self.model.get_input_embeddings().weight.requires_grad:
            # The checks tell by their gradients which tensors follow from the hidden states, the first layer's too.
            self.model.enable_input_require_grads()
        with torch.enable_grad():
            loss = self.model(**self._batch(2), use_cache=False).loss
        if loss is None or not bool(torch.isfinite(loss)):
            raise DifferenceError(f"the loss is {loss}")
        loss.backward()
        if not taken_gradients(self.model):
            raise DifferenceError("no parameter gets a gradient")

    def _check_layers(self) -> None:
        self.layers = find_layers(self.model)
        self.found.kinds = tuple(kind_names(self.layers, self.model.config))
        run = self._reference(1, "none")
        odd = next((index for index, count in enumerate(run.num_calls) if count != 1), None)
        if odd is not None:
            raise DifferenceError(f"layer {odd} is called {run.num_calls[odd]} times in a forward pass")
        hidden = run.records[0].call.hidden
        self.found.hidden_per_token = hidden.numel() // self.tiny.seq_length
        for index, kind in enumerate(self.found.kinds):
            known = enumerate(run.records[index].output_gradients)
            places = {place for place, gradient in known if gradient is not None}
            places |= set(self.found.followed_outputs.get(kind, ()))
            self.found.followed_outputs[kind] = tuple(sorted(places))

    def _reference(self, size: int, padding: Padding) -> ReferenceRun:
        if (size, padding) not in self.runs:
            run = run_reference(self.model, self.layers, self._batch(size, padding))
            self.runs[size, padding] = run
        return self.runs[size, padding]

    def _check_replay(self) -> None:
        for size in _SIZES:
            try:
                self._replay_all(size, "none")
            except _OtherLayerError as error:
                self.found.failures["uniform_layers"] = f"layers of a kind differ by a constant: {error}"
                self.separate = True
                self.builder = None
                self._replay_all(size, "none")

    def _replay_all(self, size: int, padding: Padding) -> None:
        run = self._reference(size, padding)
        builder = self._parts(padding)
        for index, name in enumerate(builder.kinds):
            part = builder.layer(name, size)
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
                raise _OtherLayerError(str(error)) from error
            if padding == "none":
                kept = bytes_saved_by(part) / (size * self.tiny.seq_length)
                self.found.saved_bytes_per_token[self.found.kinds[index]] = kept

    def _replay(self, index: int, part: LayerPart, record: LayerRecord, run: ReferenceRun) -> None:
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
        found = [tensor.grad for tensor in arguments]
        require_all_equal("gradient", zip(names, found, record.input_gradients, strict=True))
        gradients = self.layer_gradients.setdefault(index, {})
        gradients.clear()
        for (name, own), parameter in zip(part.module.named_parameters(), self.layers[index].parameters(), strict=True):
            if own.grad is not None:
                gradients[id(parameter)] = own.grad.clone()
            if id(parameter) not in self._shared():
                require_equal(f"gradient of layer {index}, {name}", own.grad, run.gradients.get(id(parameter)))

    def _shared(self) -> set[int]:
        """Parameters that more than one layer, or a layer and the shell, hold: their gradients are compared as sums."""
        seen: dict[int, int] = {}
        for layer in self.layers:
            for parameter in layer.parameters():
                seen[id(parameter)] = seen.get(id(parameter), 0) + 1
        return {key for key, count in seen.items() if count > 1}

    def _check_shell(self) -> None:
        for size in _SIZES:
            run = self._reference(size, "none")
            self._shell_gradients(run, size, "none")
            part = self._parts("none").shell(size)
            loss = part.forward()
            loss.backward()
            embedding = part.model.get_input_embeddings().weight
            reached = embedding.grad is not None or not embedding.requires_grad
            part.clear_gradients()
            if not bool(torch.isfinite(loss)) or not reached:
                raise DifferenceError("the backward pass does not reach the embedding")

    def _shell_gradients(self, run: ReferenceRun, size: int, padding: Padding) -> dict[int, Tensor]:
        part = self._parts(padding).shell(size)
        self._copy_shell_weights(part.model)
        part.clear_gradients()
        output = part.forward_with([run.records[index].stand_in() for index in range(len(self.layers))])
        require_equal("logits of the shell", output.logits, run.logits)
        require_equal("loss of the shell", output.loss, run.loss)
        output.loss.backward()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        ours = dict(part.model.named_parameters())
        found = {key: ours[name].grad for key, name in names.items() if ours[name].grad is not None}
        part.clear_gradients()
        return found

    def _copy_shell_weights(self, model: Any) -> None:
        theirs = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.device.type != "meta":
                    tensor.copy_(theirs[name])

    def _check_sum(self) -> None:
        for size in _SIZES:
            self._sum(size, "none")

    def _check_padded(self) -> None:
        for padding in ("left", "right"):
            self._replay_all(2, padding)
            self._sum(2, padding)

    def _sum(self, size: int, padding: Padding) -> None:
        run = self._reference(size, padding)
        self._replay_all(size, padding)
        total = self._shell_gradients(run, size, padding)
        for gradients in self.layer_gradients.values():
            for key, gradient in gradients.items():
                total[key] = gradient if key not in total else total[key] + gradient
        triples = ((name, total.get(id(p)), run.gradients.get(id(p))) for name, p in self.model.named_parameters())
        require_all_equal("summed gradient", triples)

    def _parts(self, padding: Padding) -> PartsBuilder:
        if self.builder is None:
            kinds = self.found.kinds
            names = [f"{kind}@{index}" for index, kind in enumerate(kinds)] if self.separate else kinds
            followed = {name: self.found.followed_outputs[kind] for name, kind in zip(names, kinds, strict=True)}
            classes = frozenset(type(layer) for layer in self.layers)
            self.builder = PartsBuilder(
                self.tiny, names, CPU, self.settings, classes=classes, followed_outputs=followed
            )
        builder: PartsBuilder = self.builder
        if builder.padding != padding:
            builder.pad(padding)
        return builder


def _require_same_arguments(index: int, part: LayerPart, record: LayerRecord) -> None:
    """The skeleton hands over what the model does, but for hidden states and what is computed from them."""
    ours = list(tensors_of((part.args, part.kwargs)))
    theirs = list(tensors_of((record.call.args, record.call.kwargs)))
    if len(ours) != len(theirs):
        raise DifferenceError(f"layer {index}: {len(ours)} tensors are handed over instead of {len(theirs)}")
    for place, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if not expected.requires_grad:
            require_equal(f"argument {place} of layer {index}", found.double(), expected.double())


def _take_values(part: LayerPart, record: LayerRecord) -> None:
    """The true hidden states, and all that depends on them, in place of those that the skeleton computed."""
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
