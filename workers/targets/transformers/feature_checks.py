"""Checks of what may be done to a model: checkpointing some layers, tiling over the batch, other experts functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings
from bexp.workers.targets.transformers.comparison import DifferenceError, require_all_equal, require_equal
from bexp.workers.targets.transformers.config import ResolvedConfig
from bexp.workers.targets.transformers.model import BuildSettings, build_model
from bexp.workers.targets.transformers.reference_run import run_plain
from bexp.workers.targets.transformers.trees import map_tensors, tensors_of

_MIXER = re.compile(r".*(Attention|Attn|Mixer|Mamba|DeltaNet|ShortConv|RecurrentBlock|SelfAttn|mLSTM|MLA).*")
_NO_MIXER = re.compile(r".*(Norm|Mask|Rotary|Layer|Cache|Block$|MLP).*")
_CHECK = "bexp_self_check"


def check_checkpointing(model: Any, layers: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> None:
    """Every other layer is checkpointed by the library's own means: same loss and gradients, and those run twice.

    DifferenceError, or what the library raises, if not.
    """
    expected = run_plain(model, batch)
    chosen = set(range(0, len(layers), 2))
    counts = [0] * len(layers)
    inner = [next(iter(layer.children()), None) for layer in layers]
    hooks = [
        module.register_forward_pre_hook(_counter(counts, i)) for i, module in enumerate(inner) if module is not None
    ]
    try:
        checkpoint_layers(model, layers, chosen)
        actual = run_plain(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
        stop_checkpointing(model)
    once = min(counts)
    again = {index for index, count in enumerate(counts) if count >= 2 * once}
    if again != chosen:
        raise DifferenceError(f"layers {sorted(again)} were recomputed instead of {sorted(chosen)}")
    _require_same_run(model, actual, expected)


def check_layer_groups(model: Any, batch: Mapping[str, Tensor]) -> None:
    """Pairs of layers are recomputed as one: same loss and gradients. DifferenceError or SettingsError if not."""
    expected = run_plain(model, batch)
    applied = set_up(model, Settings(recompute="groups_2"))
    try:
        _require_same_run(model, run_plain(model, batch), expected)
    finally:
        applied.undo()


def checkpoint_layers(model: Any, layers: Sequence[nn.Module], chosen: set[int]) -> None:
    """The library's gradient checkpointing, without re-entry, on the layers of these indices and no others.

    DifferenceError if the layers have no switch of their own.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for index, layer in enumerate(layers):
        if not hasattr(layer, "gradient_checkpointing"):
            stop_checkpointing(model)
            raise DifferenceError(f"{type(layer).__name__} cannot be checkpointed alone")
        layer.gradient_checkpointing = index in chosen  # type: ignore[assignment]  # a plain bool in the library's layers


def stop_checkpointing(model: Any) -> None:
    """Undoes `checkpoint_layers`."""
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()


def check_batch_tiles(model: Any, layers: Sequence[nn.Module], batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Attention (and recurrent mixers) run sequence by sequence: same loss and gradients. DifferenceError if not."""
    mixers = [mixer for layer in layers for mixer in find_mixers(layer)]
    if not mixers:
        raise DifferenceError("no attention module was found")
    for batch in batches:
        expected = run_plain(model, batch)
        size = batch["input_ids"].shape[0]
        try:
            for mixer in mixers:
                mixer.forward = _tiled(mixer.forward, size)
            actual = run_plain(model, batch)
        finally:
            for mixer in mixers:
                mixer.__dict__.pop("forward", None)
        _require_same_run(model, actual, expected)


def find_mixers(layer: nn.Module) -> list[nn.Module]:
    """The outermost modules of a layer that mix the tokens of a sequence, by their class names."""
    mixers: list[nn.Module] = []
    pending = list(layer.children())
    while pending:
        module = pending.pop(0)
        name = type(module).__name__
        if _MIXER.fullmatch(name) and not _NO_MIXER.fullmatch(name):
            mixers.append(module)
        else:
            pending.extend(module.children())
    return mixers


def check_experts_interface(
    tiny: ResolvedConfig, settings: BuildSettings, model: Any, batch: Mapping[str, Tensor]
) -> None:
    """`grouped_mm` and a function of our own run in place of the class's experts: same loss and gradients.

    DifferenceError if the model has no experts, does not call the function, or computes something else.
    """
    experts = find_experts(model)
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


def find_experts(model: nn.Module) -> list[nn.Module]:
    """The modules that dispatch through the library's experts interface."""
    marks = ("has_gate", "has_bias", "is_transposed")
    return [module for module in model.modules() if all(hasattr(module, mark) for mark in marks)]


def _with_experts(tiny: ResolvedConfig, settings: BuildSettings, model: Any) -> Any:
    changed = build_model(tiny, settings, torch.device("cpu"))
    changed.load_state_dict(model.state_dict())
    return changed


def _require_same_run(
    model: nn.Module, actual: tuple[Tensor, dict[int, Tensor]], expected: tuple[Tensor, dict[int, Tensor]]
) -> None:
    require_equal("loss", actual[0], expected[0])
    names = model.named_parameters()
    require_all_equal("gradient", ((name, actual[1].get(id(p)), expected[1].get(id(p))) for name, p in names))


def _counter(counts: list[int], index: int) -> Callable[..., None]:
    def count(*_: Any) -> None:
        counts[index] += 1

    return count


def _tiled(original: Callable[..., Any], size: int) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = []
        for row in range(size):
            taken = map_tensors((args, kwargs), partial(_row, row=row, size=size))
            outputs.append(original(*taken[0], **taken[1]))
        rows = [list(tensors_of(output)) for output in outputs]
        joined = iter([torch.cat(parts) if parts[0].dim() else parts[0] for parts in zip(*rows, strict=True)])
        return map_tensors(outputs[0], lambda _: next(joined))

    return forward


def _row(tensor: Tensor, row: int, size: int) -> Tensor:
    return tensor[row : row + 1] if tensor.dim() and tensor.shape[0] == size else tensor
