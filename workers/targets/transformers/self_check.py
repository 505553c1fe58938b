"""The check that a model's parts compute the same as the model, on a tiny model of the same type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bexp.explorer.cost.text_batches import TextBatch
from bexp.transformers.experts import expert_modules
from bexp.transformers.recompute import chosen_layers
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings, SettingsError
from bexp.workers.targets.transformers.batch import make_batch
from bexp.workers.targets.transformers.config import ResolvedConfig, one_line, quiet_library
from bexp.workers.targets.transformers.kinds import find_layers
from bexp.workers.targets.transformers.model import BuildSettings, build_model
from bexp.workers.targets.transformers.parts_comparison import (
    CPU,
    OtherLayerError,
    PartsComparison,
    run_plain,
    taken_gradients,
)
from bexp.workers.targets.transformers.results import DifferenceError, require_all_equal, require_equal

PARTS = ("runs", "layers", "layer_replay", "shell", "sum_of_parts")  # needed to measure by parts
FEATURES = (*PARTS, "uniform_layers", "padded_text", "checkpointing", "batch_tiles", "experts_interface")
_SETTINGS = BuildSettings(precision="pure", dtype=torch.float32)
_SIZES = (1, 2)


@dataclass
class SelfCheck:
    """The abilities of a tiny model of a type."""

    failures: dict[str, str] = field(default_factory=dict)
    """Why a feature is missing; a feature that is not named works."""
    kinds: tuple[str, ...] = ()
    """Of each layer."""
    saved_bytes_per_token: dict[str, float] = field(default_factory=dict)
    """By kind, the bytes that the tiny layer keeps for its backward pass (float32)."""
    hidden_per_token: int = 0
    """Numbers in the hidden states of one token at a layer's border."""
    followed_outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By kind, the places of the outputs that get a gradient (among the floating-point ones)."""

    @property
    def by_parts(self) -> bool:
        """Whether the model can be measured by parts."""
        return not any(name in self.failures for name in PARTS)

    @property
    def runs(self) -> bool:
        """Whether the whole model trains at all."""
        return "runs" not in self.failures


def self_check(tiny: ResolvedConfig, prepare: Callable[[Any], None] | None = None) -> SelfCheck:
    """Check every feature on `tiny`, a small configuration, in float32 on the CPU.

    `prepare` changes each model once it is built, as in `BuildSettings`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for one another
    try:
        with quiet_library():
            return _Check(tiny, _settings(prepare)).result()
    finally:
        torch.set_num_threads(threads)


def _settings(prepare: Callable[[Any], None] | None) -> BuildSettings:
    """Return settings without dropout of adapters, because random values cannot be compared."""

    def without_dropout(model: Any) -> None:
        if prepare is not None:
            prepare(model)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    return replace(_SETTINGS, prepare=without_dropout)


def find_group_problem(tiny: ResolvedConfig, prepare: Callable[[Any], None] | None = None) -> str | None:
    """Return why groups of layers of `tiny` cannot be recomputed as one on the CPU; None if they can."""
    try:
        with quiet_library():
            model = build_model(tiny, _settings(prepare), CPU)
            check_layer_groups(model, make_batch(tiny.config, TextBatch.whole(2, tiny.seq_length), CPU))
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises is the reason
        return one_line(error)
    return None


class _Check:
    def __init__(self, tiny: ResolvedConfig, settings: BuildSettings) -> None:
        self.tiny = tiny
        self.settings = settings
        self.found = SelfCheck()
        self.model: Any = None
        self.comparison: PartsComparison  # once the layers are found

    def result(self) -> SelfCheck:
        """Run the checks in order, and note failures. A check that needs a failed one fails with it."""
        self._try("runs", self._check_whole)
        self._try("layers", self._check_layers, needs=("runs",))
        self._try("layer_replay", self._check_replay, needs=("runs", "layers"))
        self._try("shell", lambda: self._for_sizes(self.comparison.require_shell), needs=("runs", "layers"))
        replayed = ("layer_replay", "shell")
        self._try("sum_of_parts", lambda: self._for_sizes(self.comparison.require_sum), needs=replayed)
        self._try("padded_text", lambda: self.comparison.require_sum(_padded(self.tiny)), needs=replayed)
        needed = ("runs", "layers")
        self._try(
            "checkpointing", lambda: check_checkpointing(self.model, self.comparison.layers, self._batch(2)), needed
        )
        self._try("batch_tiles", lambda: check_batch_tiles(self.model, self._batches(2)), needed)
        self._try(
            "experts_interface",
            lambda: check_experts_interface(self.tiny, self.settings, self.model, self._batch(2)),
            needs=("runs",),
        )
        return self.found

    def _for_sizes(self, check: Callable[[int], None]) -> None:
        for size in _SIZES:
            check(size)

    def _try(self, name: str, check: Callable[[], None], needs: tuple[str, ...] = ()) -> None:
        missing = [one for one in needs if one in self.found.failures]
        if missing:
            self.found.failures[name] = f"needs {missing[0]}"
            return
        try:
            check()
        except (DifferenceError, SettingsError) as error:
            self.found.failures[name] = str(error)
        except Exception as error:  # noqa: BLE001 - whatever a model's code raises is the reason
            self.found.failures[name] = one_line(error)

    def _batch(self, texts: TextBatch | int) -> dict[str, Tensor]:
        texts = TextBatch.whole(texts, self.tiny.seq_length) if isinstance(texts, int) else texts
        return make_batch(self.tiny.config, texts, CPU)

    def _batches(self, size: int) -> list[dict[str, Tensor]]:
        """Micro-batches without padding and, where the model takes it, with."""
        whole = [self._batch(size)]
        return whole if "padded_text" in self.found.failures else [*whole, self._batch(_padded(self.tiny))]

    def _check_whole(self) -> None:
        self.model = build_model(self.tiny, self.settings, CPU)
        if not self.model.get_input_embeddings().weight.requires_grad:
            # Gradients show the checks which tensors follow from the hidden states, the first layer's too.
            self.model.enable_input_require_grads()
        with torch.enable_grad():
            loss = self.model(**self._batch(2), use_cache=False).loss
        if loss is None or not bool(torch.isfinite(loss)):
            raise DifferenceError(f"the loss is {loss}")
        loss.backward()
        if not taken_gradients(self.model):
            raise DifferenceError("no parameter gets a gradient")

    def _check_layers(self) -> None:
        self.comparison = PartsComparison(self.tiny, self.settings, self.model, find_layers(self.model))
        self.found.kinds = self.comparison.kinds
        run = self.comparison.reference(1)
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
        self.comparison.followed_outputs = self.found.followed_outputs

    def _check_replay(self) -> None:
        for size in _SIZES:
            try:
                self.comparison.replay_all(size)
            except OtherLayerError as error:
                self.found.failures["uniform_layers"] = f"layers of a kind differ by a constant: {error}"
                self.comparison.build_separately()
                self.comparison.replay_all(size)
        self.found.saved_bytes_per_token = self.comparison.saved_bytes_per_token


def _padded(tiny: ResolvedConfig) -> TextBatch:
    """Two texts, of which one is padded."""
    return TextBatch(((tiny.seq_length,), (max(1, tiny.seq_length // 2),)), tiny.seq_length)


_CHECK = "bexp_self_check"


def check_checkpointing(model: Any, layers: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> None:
    """Recompute half of the layers as `bexp.apply` does: the loss and the gradients must not change.

    Raises DifferenceError, SettingsError, or an error of the library if they do, or if other layers run twice.
    """
    expected, settings = run_plain(model, batch), Settings(recompute="partial_50")
    chosen = chosen_layers(settings, len(layers))
    counts = [0] * len(layers)
    inner = [next(iter(layer.children()), None) for layer in layers]
    hooks = [
        module.register_forward_pre_hook(partial(_count, counts, i))
        for i, module in enumerate(inner)
        if module is not None
    ]
    try:
        actual = _run_with(model, settings, batch)
    finally:
        for hook in hooks:
            hook.remove()
    once = min(counts)
    again = {index for index, count in enumerate(counts) if count >= 2 * once}
    if again != chosen:
        raise DifferenceError(f"layers {sorted(again)} were recomputed instead of {sorted(chosen)}")
    _require_same_run(model, actual, expected)


def check_layer_groups(model: Any, batch: Mapping[str, Tensor]) -> None:
    """Recompute pairs of layers as one. Raises DifferenceError or SettingsError unless loss and gradients stay."""
    expected = run_plain(model, batch)
    _require_same_run(model, _run_with(model, Settings(recompute="groups_2"), batch), expected)


def check_batch_tiles(model: Any, batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Run attention (and recurrent mixers) sequence by sequence.

    Raises DifferenceError or SettingsError unless loss and gradients stay.
    """
    for batch in batches:
        expected = run_plain(model, batch)
        _require_same_run(model, _run_with(model, Settings(bta_tile=1), batch), expected)


def check_experts_interface(
    tiny: ResolvedConfig, settings: BuildSettings, model: Any, batch: Mapping[str, Tensor]
) -> None:
    """Run `grouped_mm` and a function of our own in place of the class's experts.

    Raises DifferenceError if the model has no experts, does not call the function, or computes something else.
    """
    experts = expert_modules(model)
    if not experts:
        raise DifferenceError("no experts that take the library's experts interface")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415 - transformers is optional

    calls = 0
    grouped = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def ours(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return grouped(*args, **kwargs)

    ALL_EXPERTS_FUNCTIONS[_CHECK] = ours
    try:
        eager = _with_experts(tiny, replace(settings, experts="eager"), model)
        expected = run_plain(eager, batch)
        changed = _with_experts(tiny, replace(settings, experts=_CHECK), model)
        actual = run_plain(changed, batch)
    finally:
        ALL_EXPERTS_FUNCTIONS.pop(_CHECK)
    if calls < len(experts):
        raise DifferenceError(f"{len(experts)} experts modules, {calls} calls of the function that was set")
    names = {id(own): id(other) for own, other in zip(changed.parameters(), eager.parameters(), strict=True)}
    _require_same_run(eager, (actual[0], {names[key]: value for key, value in actual[1].items()}), expected)


def _with_experts(tiny: ResolvedConfig, settings: BuildSettings, model: Any) -> Any:
    changed = build_model(tiny, settings, CPU)
    changed.load_state_dict(model.state_dict())
    return changed


def _run_with(model: Any, settings: Settings, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
    applied = set_up(model, settings)
    try:
        return run_plain(model, batch)
    finally:
        applied.undo()


def _require_same_run(
    model: nn.Module, actual: tuple[Tensor, dict[int, Tensor]], expected: tuple[Tensor, dict[int, Tensor]]
) -> None:
    require_equal("loss", actual[0], expected[0])
    names = model.named_parameters()
    require_all_equal("gradient", ((name, actual[1].get(id(p)), expected[1].get(id(p))) for name, p in names))


def _count(counts: list[int], index: int, *_: Any) -> None:
    counts[index] += 1
