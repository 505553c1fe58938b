"""The kernels of a model's norms, rotation and gated activations: the library's own, or those of liger-kernel.

liger replaces methods of a model's modules and names in the library's module of its class. Here it gets the decoder
layers alone, so that a layer by itself and a layer within a model are changed alike. Experts are left as they are,
because they have a setting of their own. The final norm stays the library's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from torch import nn

from bexp.transformers.experts import expert_modules
from bexp.transformers.layers import configurations, decoder_layers
from bexp.transformers.settings import SettingsError
from bexp.transformers.undo import Changes

_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
_FINAL_NORMS = ("norm", "final_layernorm")
_MISSING = object()


def set_kernels(module: nn.Module, changes: Changes) -> None:
    """Let liger's kernels compute what they can of every decoder layer.

    The rotation is a function of the class's module: while it is set, all models of the class take it.
    Raises SettingsError if liger-kernel is not installed, does not know the model's type, or fails on its layers.
    """
    layers = decoder_layers(module)
    if not layers:
        raise SettingsError(f"{type(module).__name__} has no decoder layers whose kernels can be replaced")
    config = _config_of(layers, module)
    replace = _replacement(config.model_type)
    stand_in = _stand_in(config, layers)
    parts = [part for layer in layers for part in layer.modules()]
    experts = {id(part) for experts_module in expert_modules(stand_in) for part in experts_module.modules()}
    # A sharded layer's own class is fully_shard's; the library's is among its bases.
    classes = {class_ for layer in layers for class_ in type(layer).__mro__ if issubclass(class_, nn.Module)}
    names = [_Namespace(vars(sys.modules[source])) for source in {class_.__module__ for class_ in classes}]
    attributes = [(_Namespace(vars(part)), id(part) in experts) for part in parts]
    known = inspect.signature(replace).parameters
    try:
        replace(model=stand_in, **{name: False for name in _LOSSES if name in known})
    except Exception as error:  # the library's patches raise whatever a class that they do not know makes them raise
        for namespace in [*names, *(namespace for namespace, _ in attributes)]:
            namespace.restorer(namespace.changed())()
        raise SettingsError(f"liger-kernel fails on {type(layers[0]).__name__}: {error}") from error
    num_changed = 0
    for namespace, is_expert in attributes:
        num_changed += _keep(namespace, () if is_expert else namespace.changed(), changes)
    for namespace in names:  # classes matter only to models that are built later, which nobody asked to change
        num_changed += _keep(namespace, (n for n in namespace.changed() if not namespace.is_class(n)), changes)
    if not num_changed:
        raise SettingsError(f"liger-kernel changes nothing in {type(layers[0]).__name__}")


def import_liger(name: str) -> Any:
    """Return the module `name` of liger-kernel. Raises SettingsError if it cannot be imported, as without Triton."""
    try:
        return import_module(f"liger_kernel.transformers.{name}")
    except (ImportError, RuntimeError) as error:
        raise SettingsError(f"liger's kernels need liger-kernel: pip install liger-kernel ({error})") from error


def _replacement(model_type: str) -> Callable[..., None]:
    """Return liger's function for a type of model."""
    known: dict[str, Callable[..., None]] = import_liger("monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if model_type not in known:
        raise SettingsError(f"liger-kernel does not know the model type '{model_type}'")
    return known[model_type]


def _config_of(layers: list[nn.Module], module: nn.Module) -> Any:
    """Return the configuration of the layers themselves: it names the decoder, not a model that contains it."""
    configs = configurations(layers[0]) or configurations(module)
    if not configs:
        raise SettingsError(f"{type(layers[0]).__name__} has no configuration, so its type is not known")
    return configs[0]


def _stand_in(config: Any, layers: list[nn.Module]) -> Any:
    """Return a model with nothing but `layers`, of the class that holds such layers, because liger asks for it."""
    from transformers import MODEL_MAPPING  # noqa: PLC0415 - optional

    if type(config) not in MODEL_MAPPING:
        raise SettingsError(f"transformers has no model of {type(config).__name__} alone, so liger cannot change it")
    class_: Any = MODEL_MAPPING[type(config)]
    model: Any = class_.__new__(class_)
    nn.Module.__init__(model)
    model.config = config
    model.layers = nn.ModuleList(layers)
    for name in _FINAL_NORMS:
        setattr(model, name, nn.Module())
    return model


class _Namespace:
    """The attributes of a module, or the names in a source file, and what they were at first."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._before = dict(values)

    def changed(self) -> list[str]:
        """Return the names whose values have changed since the beginning."""
        names = {**self._before, **self._values}
        return [n for n in names if self._values.get(n, _MISSING) is not self._before.get(n, _MISSING)]

    def is_class(self, name: str) -> bool:
        """Return whether a name stands for a class."""
        return isinstance(self._before.get(name), type) or isinstance(self._values.get(name), type)

    def restorer(self, names: Iterable[str]) -> Callable[[], None]:
        """Return the function that gives `names` their first values back."""
        names = tuple(names)

        def restore() -> None:
            for name in names:
                if name in self._before:
                    self._values[name] = self._before[name]
                else:
                    self._values.pop(name, None)

        return restore


def _keep(namespace: _Namespace, names: Iterable[str], changes: Changes) -> int:
    """Restore all but `names`, restore those when the changes are undone, and return how many they are."""
    kept = set(names)
    namespace.restorer(name for name in namespace.changed() if name not in kept)()
    if kept:
        changes.on_undo(namespace.restorer(kept))
    return len(kept)
