"""Contexts in which a model computes otherwise: without what is random or depends on its batch, or rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

RANDOM = ("drop", "jitter")
"""Parts of the names of probabilities and noises, in torch and in transformers."""
ROUTER = ("router_aux_loss_coef", "aux_loss_alpha", "aux_loss_coef", "router_z_loss_coef", "z_loss_coef")
"""Coefficients of the losses that balance routers."""
_SUB_CONFIG = "_config"

Setting = tuple[Any, str]


@contextmanager
def nothing_random(model: nn.Module) -> Iterator[None]:
    """Set every dropout and noise of a model to zero, and leave it in training mode otherwise."""
    switched = [
        (owner, name)
        for owner in _owners(model)
        for name, value in vars(owner).items()
        if isinstance(value, float) and value != 0.0 and any(word in name.lower() for word in RANDOM)
    ]
    switched += [
        (module, "p")
        for module in model.modules()
        if "dropout" in type(module).__name__.lower() and isinstance(getattr(module, "p", None), float)
    ]
    with _zero(switched):
        yield


def without_router_loss(model: nn.Module) -> Callable[[], AbstractContextManager[None]] | None:
    """Return a context without the losses that balance a model's routers; None if it has none."""
    switched = [
        (owner, name)
        for owner in _owners(model)
        for name in ROUTER
        if isinstance(vars(owner).get(name), float) and vars(owner)[name] != 0.0
    ]
    return partial(_zero, switched) if switched else None


def without_batch_statistics(model: nn.Module) -> Callable[[], AbstractContextManager[None]] | None:
    """Return a context in which batch norms use their running statistics; None if none uses those of the batch."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    return partial(_as_in_evaluation, norms) if norms else None


def _owners(model: nn.Module) -> Iterator[Any]:
    seen = set[int]()
    waiting: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    yield from model.modules()
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not hasattr(config, "__dict__"):
            continue
        seen.add(id(config))
        yield config
        waiting += [value for name, value in vars(config).items() if name.endswith(_SUB_CONFIG)]


@contextmanager
def _zero(settings: Sequence[Setting]) -> Iterator[None]:
    """Set fields to zero, and back."""
    before = [(owner, name, getattr(owner, name)) for owner, name in settings]
    try:
        for owner, name in settings:
            setattr(owner, name, 0.0)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def _as_in_evaluation(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Set evaluation mode before each call, because a training step sets the mode of the whole model."""
    before = [norm.training for norm in norms]
    handles = [norm.register_forward_pre_hook(_evaluate) for norm in norms]
    try:
        yield
    finally:
        for norm, handle, is_training in zip(norms, handles, before, strict=True):
            handle.remove()
            norm.train(is_training)


def _evaluate(norm: nn.Module, _: Any) -> None:
    norm.train(False)


LOSS_SCALE = 0.73
"""The loss is multiplied by this, and its gradients divided: no power of two, so all roundings backwards change."""


@contextmanager
def rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Change the output of each layer with parameters by about one rounding of its number format.

    In low precision two sizes of a micro-batch differ by as much, which may change the choice of a router.
    """
    layers = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    handles = [layer.register_forward_hook(_round_otherwise) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _round_otherwise(_: nn.Module, __: Any, output: Any) -> Any:
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return output
    noise = torch.rand_like(output).sub_(0.5).mul_(output.detach()).mul_(torch.finfo(output.dtype).eps)
    return output + noise
