"""Sets a model up, and takes that back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn

from bexp.explorer.dimensions.candidate import CHOICES
from bexp.explorer.dimensions.recompute import Recompute
from bexp.kernels.context_parallel.attention import ContextParallel
from bexp.transformers.attention import set_attention
from bexp.transformers.context_parallel import describe, set_context_parallel
from bexp.transformers.experts import leave_eager, set_experts
from bexp.transformers.float8 import set_float8
from bexp.transformers.graph import set_graph
from bexp.transformers.kernels import set_kernels
from bexp.transformers.layers import configurations, decoder_layers, is_layer
from bexp.transformers.loss import set_loss
from bexp.transformers.recompute import BY_OPERATION, LAYERS_KEPT, is_checkpointing, set_recompute, stop_checkpointing
from bexp.transformers.settings import Settings, SettingsError
from bexp.transformers.tiling import set_tile
from bexp.transformers.undo import Changes

if missing := [c.name for c in CHOICES if c.settings is None and find_spec(f"bexp.transformers.{c.name}") is None]:
    raise TypeError(f"nothing sets {', '.join(missing)} on a model: write bexp/transformers/{missing[0]}.py")


@dataclass(frozen=True)
class Applied:
    """What was set on a model. `undo` takes it back; wrappers that were added since must be removed first."""

    settings: Settings
    done: tuple[str, ...]
    _changes: Changes = field(repr=False)

    def undo(self) -> None:
        """Restore the model as it was. A second call does nothing."""
        self._changes.undo()

    def __str__(self) -> str:
        """One line for each setting."""
        return "\n".join(self.done) or "nothing had to be set"


def set_up(
    module: nn.Module,
    settings: Settings,
    *,
    strict: bool = False,
    chunk: int | None = None,
    context_parallel: ContextParallel | None = None,
) -> Applied:
    """Set `settings` on a transformers model, or on one decoder layer alone.

    A layer alone has no loss and no micro-step: `loss` and `graph` are left out there. Weights keep their names, shapes
    and places. The allocator is the process's and not the model's: `bexp.allocator` sets it. With `strict` a pinned
    attention back end fails where it would leave a call to another. `chunk` is the number of tokens of a chunk of the
    loss. With `context_parallel` the ranks of its group share each sequence (`set_context_parallel`). A configuration's
    `use_cache` is set to false, since training has no use for a cache. While layers are compiled, torch's splitting of
    graphs by DistributedDataParallel's buckets is off in the process.

    Raises `SettingsError` if the model cannot have a setting; the model is then as it was.
    """
    done: list[str] = []
    with Changes() as changes:
        for text, apply in _steps(module, settings, changes, strict=strict, chunk=chunk, context=context_parallel):
            apply()
            done.append(text)
    return Applied(settings, tuple(done), changes)


def _steps(
    module: nn.Module,
    settings: Settings,
    changes: Changes,
    *,
    strict: bool,
    chunk: int | None,
    context: ContextParallel | None,
) -> list[tuple[str, Callable[[], None]]]:
    """Return each setting that differs from the library's, in words, with its setter. Inner modules come first."""
    steps: list[tuple[str, Callable[[], None]]] = []
    core = settings.policy is Recompute.SELECTIVE
    by_operation = settings.policy in BY_OPERATION
    if (recipe := settings.float8) is not None:
        steps.append(
            (f"linear layers of decoder layers: float8 ({recipe})", lambda: set_float8(module, recipe, changes))
        )
    if settings.kernels == "liger":
        steps.append(("norms, rotation and gated activations: liger-kernel", lambda: set_kernels(module, changes)))
    if context is None and (settings.attention is not None or core):
        text = f"attention: {settings.attention or 'unchanged'}{', its core recomputed' if core else ''}"
        steps.append(
            (text, lambda: set_attention(module, settings.attention, changes, recompute_core=core, strict=strict))
        )
    if settings.experts is not None:
        steps.append(
            (
                f"experts: {settings.experts}",
                lambda: set_experts(module, settings.experts, changes, as_operator=by_operation),
            )
        )
    if settings.bta_tile is not None:
        steps.append(
            (f"attention tiles of {settings.bta_tile} sequences", lambda: set_tile(module, settings.bta_tile, changes))
        )
    if settings.policy in LAYERS_KEPT and is_checkpointing(module):
        steps.append(("gradient checkpointing: switched off", lambda: stop_checkpointing(module, changes)))
    if settings.policy is not Recompute.NONE and not core:
        steps.append((f"recomputation: {settings.recompute}", lambda: set_recompute(module, settings, changes)))
    for name, value in settings.others:
        steps.append(
            (f"{name}: {value}", partial(import_module(f"bexp.transformers.{name}").set_up, module, value, changes))
        )
    if settings.loss != "library" and not is_layer(module):
        steps.append((f"loss: {settings.loss}", lambda: set_loss(module, settings.loss, changes, chunk=chunk)))
    if context is not None:
        if settings.graph:
            raise SettingsError("CUDA graphs do not hold what devices exchange that share sequences")
        asked = settings.attention
        steps.append(
            (describe(context), lambda: set_context_parallel(module, context, asked, changes, recompute_core=core))
        )
    if settings.compile:
        steps.append(("every decoder layer compiled", lambda: _compile(module, settings.experts, changes)))
    if not is_layer(module) and (steps or settings.graph):
        steps.append(("no cache of keys and values in training", lambda: _without_cache(module, changes)))
    if settings.graph and not is_layer(module):
        replayed = "the micro-step replayed as CUDA graphs"
        text = replayed if torch.cuda.is_available() else "no CUDA graphs, because torch finds no GPU here"
        steps.append((text, lambda: set_graph(module, changes)))
    return steps


def _compile(module: nn.Module, experts: str | None, changes: Changes) -> None:
    import torch._dynamo.config as dynamo  # noqa: PLC0415 - takes seconds, and eager layers do not need it

    leave_eager(experts)
    changes.on_undo(partial(setattr, dynamo, "optimize_ddp", dynamo.optimize_ddp))
    dynamo.optimize_ddp = False  # it splits graphs by buckets, and fails in a part of a layer
    for layer in decoder_layers(module):
        before = getattr(layer, "_compiled_call_impl", None)
        changes.on_undo(partial(setattr, layer, "_compiled_call_impl", before))
        layer.compile()


def _without_cache(module: nn.Module, changes: Changes) -> None:
    for config in configurations(module):
        if getattr(config, "use_cache", None):
            changes.set(config, "use_cache", False)
