"""BTA, batch tiling on attention, around a model's own attention modules.

Attention mixes the tokens of a sequence but never sequences. So the module can run over the batch tile by tile, and
each tile runs again in backward. The output and the gradients do not change, and the module's activations exist for
one tile at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bexp.transformers.layers import decoder_layers, token_mixers
from bexp.transformers.settings import SettingsError
from bexp.transformers.undo import Changes

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def set_tile(module: nn.Module, tile: int | None, changes: Changes) -> None:
    """Tile the attention modules of a model, or of one decoder layer. Raises SettingsError if none is found."""
    if tile is None:
        return
    layers = decoder_layers(module)
    mixers = [mixer for layer in layers for mixer in token_mixers(layer)]
    if not mixers or any(not token_mixers(layer) for layer in layers):
        raise SettingsError(f"the attention modules of {type(module).__name__} are not found, so they cannot be tiled")
    for mixer in mixers:
        changes.set(mixer, "forward", functools.partial(run_tiled, mixer.forward, tile))


def run_tiled(forward: Callable[..., Any], tile: int, *args: Any, **kwargs: Any) -> Any:
    """Run `forward` in tiles of `tile` sequences. The last tile is smaller if the batch is not a multiple of `tile`.

    The first tensor (B, S, ...) defines the batch size. Every tensor argument with that many sequences is split as
    well, also inside tuples. Arguments that all sequences share are passed through. With a cache the module runs whole.
    """
    sample = _first_tensor(args, kwargs)
    if sample is None or any(kwargs.get(name) is not None for name in _CACHES):
        return forward(*args, **kwargs)
    batch, length = sample.shape[:2]
    if batch <= tile and not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    outputs = []
    for start in range(0, batch, tile):
        part = functools.partial(_cut, batch=batch, length=length, start=start, tile=tile)
        tile_args = tuple(part(arg) for arg in args)
        tile_kwargs = {name: part(value) for name, value in kwargs.items()}
        if torch.is_grad_enabled():
            outputs.append(checkpoint(forward, *tile_args, use_reentrant=False, **tile_kwargs))
        else:
            outputs.append(forward(*tile_args, **tile_kwargs))
    return _joined(outputs)


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    return hidden if isinstance(hidden, Tensor) and hidden.ndim >= 3 else None


def _cut(value: Any, *, batch: int, length: int, start: int, tile: int) -> Any:
    """Return the tile's part of an argument. Axis 0 is the batch only if the next axis can be a sequence."""
    if isinstance(value, Tensor):
        per_sequence = value.ndim >= 3 or (value.ndim == 2 and value.shape[1] == length)
        return value[start : start + tile] if per_sequence and value.shape[0] == batch else value
    if isinstance(value, tuple | list):
        return type(value)(_cut(part, batch=batch, length=length, start=start, tile=tile) for part in value)
    return value


def _joined(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return first if len(outputs) == 1 else torch.cat(outputs)
    if isinstance(first, tuple):
        return tuple(_joined([output[i] for output in outputs]) for i in range(len(first)))
    if first is None:
        return None
    raise SettingsError(f"an attention module that returns {type(first).__name__} cannot be tiled")
