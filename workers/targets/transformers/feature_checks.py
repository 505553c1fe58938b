"""Checks of what may be done to a model: checkpointing some layers, tiling over the batch, other experts functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bexp.transformers.experts import expert_modules
from bexp.transformers.recompute import chosen_layers
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings
from bexp.workers.targets.transformers.comparison import DifferenceError, require_all_equal, require_equal
from bexp.workers.targets.transformers.config import ResolvedConfig
from bexp.workers.targets.transformers.model import BuildSettings, build_model
from bexp.workers.targets.transformers.reference_run import run_plain

_CHECK = "bexp_self_check"


def check_checkpointing(model: Any, layers: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> None:
    """Half of the layers are recomputed as `bexp.apply` sets it: same loss and gradients, and those run twice.

    DifferenceError, SettingsError, or what the library raises, if not.
    """
    expected, settings = run_plain(model, batch), Settings(recompute="partial_50")
    chosen = chosen_layers(settings, len(layers))
    counts = [0] * len(layers)
    inner = [next(iter(layer.children()), None) for layer in layers]
    hooks = [
        module.register_forward_pre_hook(_counter(counts, i)) for i, module in enumerate(inner) if module is not None
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
    """Pairs of layers are recomputed as one: same loss and gradients. DifferenceError or SettingsError if not."""
    expected = run_plain(model, batch)
    _require_same_run(model, _run_with(model, Settings(recompute="groups_2"), batch), expected)


def check_batch_tiles(model: Any, batches: Sequence[Mapping[str, Tensor]]) -> None:
    """Attention (and recurrent mixers) run sequence by sequence: same loss and gradients.

    DifferenceError or SettingsError if not.
    """
    for batch in batches:
        expected = run_plain(model, batch)
        _require_same_run(model, _run_with(model, Settings(bta_tile=1), batch), expected)


def check_experts_interface(
    tiny: ResolvedConfig, settings: BuildSettings, model: Any, batch: Mapping[str, Tensor]
) -> None:
    """`grouped_mm` and a function of our own run in place of the class's experts: same loss and gradients.

    DifferenceError if the model has no experts, does not call the function, or computes something else.
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
    changed = build_model(tiny, settings, torch.device("cpu"))
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


def _counter(counts: list[int], index: int) -> Callable[..., None]:
    def count(*_: Any) -> None:
        counts[index] += 1

    return count
