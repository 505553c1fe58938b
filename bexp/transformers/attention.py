"""The attention implementation of a model: transformers' own by name, or torch's SDPA with one back end pinned."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from bexp.transformers.layers import configurations
from bexp.transformers.settings import SettingsError
from bexp.transformers.undo import Changes

_LOGGER = logging.getLogger(__name__)
_PINNED = {
    "flash": ("fa", SDPBackend.FLASH_ATTENTION),
    "cudnn": ("cudnn", SDPBackend.CUDNN_ATTENTION),
    "efficient": ("efficient", SDPBackend.EFFICIENT_ATTENTION),
    "math": ("math", SDPBackend.MATH),
}
"""The name of each back end within the registered name, and torch's name of it.

transformers prepares masks for another package if a registered name contains "flash".
"""
_MASKLESS = ("flash",)


def set_attention(
    module: Any, attention: str | None, changes: Changes, *, recompute_core: bool = False, strict: bool = False
) -> None:
    """Set the attention implementation called `attention`. `recompute_core` recomputes its core in backward.

    A pinned flash back end takes no mask. A call with a mask runs on the back end that torch chooses, after one
    warning; if `strict` is set, it fails. Raises SettingsError if the model's class does not support the setting.
    """
    if attention is None and not recompute_core:
        return
    configs = configurations(module)
    if not configs:
        raise SettingsError(f"{type(module).__name__} has no configuration to set its attention in")
    asked = attention or configs[0]._attn_implementation
    name = registered_name(asked, recompute_core=recompute_core, strict=strict)
    for config in configs:
        _restorable(config, "_attn_implementation_internal", changes)
    setter = getattr(module, "set_attn_implementation", None)
    if setter is None:
        for config in configs:
            config._attn_implementation_internal = name
        return
    if not module._can_set_attn_implementation():
        raise SettingsError(f"{type(module).__name__} does not use transformers' attention interface")
    _checked(module, asked.partition(":")[0])
    try:
        setter(name)
    except (ValueError, ImportError, KeyError) as error:
        raise SettingsError(f"attention '{asked}': {error}") from error
    if module.config._attn_implementation != name:
        raise SettingsError(f"{type(module).__name__} took '{module.config._attn_implementation}' for '{asked}'")


def registered_name(attention: str, *, recompute_core: bool = False, strict: bool = False) -> str:
    """Return the name under which transformers finds `attention`; it is registered on first use."""
    base, _, backend = attention.partition(":")
    if not backend and not recompute_core:
        return base
    parts = ["bexp", base.replace("flash_attention", "fa"), _PINNED[backend][0] if backend else ""]
    parts += ["recomputed" if recompute_core else "", "strict" if strict and backend in _MASKLESS else ""]
    name = "_".join(part for part in parts if part)
    _register(name, base, backend, recompute_core=recompute_core, strict=strict)
    return name


def _checked(module: Any, base: str) -> None:
    """Ask the library whether the class supports `base`, because the library knows only its own names."""
    if base == "eager":
        return
    try:
        module._check_and_adjust_attn_implementation(base, is_init_check=False)
    except AttributeError:
        return
    except (ValueError, ImportError) as error:
        raise SettingsError(f"attention '{base}': {error}") from error


def _register(name: str, base: str, backend: str, *, recompute_core: bool, strict: bool) -> None:
    from transformers import AttentionInterface  # noqa: PLC0415 - optional
    from transformers.masking_utils import AttentionMaskInterface  # noqa: PLC0415 - optional

    functions: Any = AttentionInterface()
    if name in functions:
        return
    if base == "eager":
        raise SettingsError("the core of eager attention belongs to each model: it cannot be recomputed alone")
    if base not in functions:
        raise SettingsError(f"transformers has no attention '{base}': {', '.join(sorted(functions.valid_keys()))}")
    function: Callable[..., Any] = functions[base]
    if backend:
        function = _pinned(function, backend, strict=strict)
    if recompute_core:
        function = _recomputed(function)
    AttentionInterface.register(name, function)
    masks: Any = AttentionMaskInterface()
    if base in masks:
        AttentionMaskInterface.register(name, masks[base])


def _pinned(function: Callable[..., Any], backend: str, *, strict: bool) -> Callable[..., Any]:
    kernel = _PINNED[backend][1]

    @functools.wraps(function)
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        if attention_mask is not None and backend in _MASKLESS and not strict:
            _warn_of_masks(backend)
            return function(module, query, key, value, attention_mask, **kwargs)
        if query.device.type == "cpu" and backend != "math":  # the host has one fused kernel, and torch picks it
            return function(module, query, key, value, attention_mask, **kwargs)
        if torch.compiler.is_compiling():
            with sdpa_kernel(kernel):
                return function(module, query, key, value, attention_mask, **kwargs)
        try:
            with _Only(backend):
                return function(module, query, key, value, attention_mask, **kwargs)
        except RuntimeError as error:
            if not _NO_KERNEL.search(str(error)):
                raise
            shapes = f"queries {tuple(query.shape)}, keys {tuple(key.shape)}, {query.dtype}"
            raise SettingsError(f"torch's {backend} attention has no kernel for {shapes}") from error

    return attend


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def attend(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        random = bool(kwargs.get("dropout"))
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=random, **kwargs)

    return attend


@functools.cache
def _warn_of_masks(backend: str) -> None:
    _LOGGER.warning("sdpa:%s takes no mask: batches with one go to the back end that torch picks", backend)


_NO_KERNEL = re.compile("Invalid backend|No available kernel|No viable backend")
"""torch's messages, by version, if the enabled back end cannot run: `efficient` takes no grouped queries."""


class _Only:
    """A context with one back end of torch's SDPA. `sdpa_kernel` does the same, but takes as long as two launches."""

    _SWITCHES: tuple[tuple[str, Callable[[], bool], Any], ...] = (
        ("flash", torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
        ("efficient", torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
        ("math", torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
        ("cudnn", torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    )

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before = [enabled() for _, enabled, _ in self._SWITCHES]
        for name, _, enable in self._SWITCHES:
            enable(name == self._backend)

    def __exit__(self, *_: object) -> None:
        for (_name, _enabled, enable), before in zip(self._SWITCHES, self._before, strict=True):
            enable(before)


def _restorable(config: Any, name: str, changes: Changes) -> None:
    before = getattr(config, name, None)
    changes.on_undo(lambda: setattr(config, name, before))
