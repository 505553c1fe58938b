"""Weights in four or eight bits, in the layers that transformers builds with bitsandbytes, and adapters around them."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from bexp.explorer.model.optimizers import BITSANDBYTES
from bexp.explorer.model.quantization import Quantization
from bexp.out_of_memory import is_out_of_memory
from bexp.workers.targets.transformers.config import UnsupportedModelError, one_line, quiet_library

if TYPE_CHECKING:
    from bexp.workers.targets.transformers.layers import BuiltLayer
import re
from collections import Counter

from bexp.explorer.model.training import LINEAR_MODULES, LoRASpec, lora_arguments


def require_library(quantization: Quantization) -> None:
    """Raise UnsupportedModelError if bitsandbytes is missing, or broken."""
    try:
        import_module(BITSANDBYTES)
    except Exception as error:  # a library that is broken in any way
        install = f"pip install 'bexp[{BITSANDBYTES}]'"
        raise UnsupportedModelError(
            f"quantization '{quantization.name}' needs {BITSANDBYTES}: {install} ({one_line(error)})"
        ) from error


class Quantizer:
    """Quantised linear layers in place of a model's own, as transformers makes them when it loads a model.

    The layers that transformers chooses are replaced at once. Their weights are quantised by `convert`, which may
    follow layer by layer; until then they are in `plain_of`.
    """

    def __init__(self, model: Any, quantization: Quantization, device: torch.device) -> None:
        """Replace the layers.

        Raises:
            UnsupportedModelError: bitsandbytes is missing or refuses the device, or transformers changes more than
                linear layers.
        """
        require_library(quantization)
        from transformers import BitsAndBytesConfig  # noqa: PLC0415 - transformers is optional
        from transformers.quantizers.auto import AutoHfQuantizer  # noqa: PLC0415 - transformers is optional

        self._model = model
        self._name = quantization.name
        plain = dict(model.named_modules())
        place = {"": device.type if device.index is None else str(device)}
        with quiet_library():
            try:
                arguments = {name: value for name, value in quantization.arguments.items() if name != "quant_method"}
                config = BitsAndBytesConfig(**arguments)
                self._library = AutoHfQuantizer.from_config(config, pre_quantized=quantization.is_own)
                self._library.validate_environment(device_map=place)
                self._library.preprocess_model(model, device_map=place)
            except Exception as error:  # a library refuses in ways of its own
                if is_out_of_memory(error):
                    raise
                raise self._refused(error) from error
        self._waiting: dict[int, tuple[str, nn.Module, nn.Module]] = {}
        for name, module in model.named_modules():
            if plain.get(name) is module:
                continue
            if not isinstance(getattr(plain.get(name), "weight", None), Tensor):
                kind = type(plain.get(name, module)).__name__
                raise UnsupportedModelError(f"quantization '{self._name}': transformers replaces {kind} as a whole")
            self._waiting[id(module)] = (name, module, plain[name])

    def plain_of(self, module: nn.Module) -> nn.Module:
        """Return the plain layer with the weights of a replaced one; `module` itself if it was not replaced."""
        return self._waiting[id(module)][2] if id(module) in self._waiting else module

    def convert(self, modules: Iterable[nn.Module]) -> None:
        """Quantise the weights of those of `modules` that wait for them. The plain weights are dropped.

        Raises:
            UnsupportedModelError: the library refuses to.
        """
        operation = self._library.get_quantize_ops()
        for module in modules:
            if id(module) not in self._waiting:
                continue
            name, _, plain = self._waiting.pop(id(module))
            path = f"{name}.weight"
            weight, bias = plain.weight, plain.bias
            assert isinstance(weight, Tensor) and not isinstance(bias, nn.Module), "a linear layer has them"
            try:
                made = operation.convert({path: [weight.data]}, full_layer_name=path, model=self._model)
            except Exception as error:  # a library refuses in ways of its own
                if is_out_of_memory(error):
                    raise
                raise self._refused(error) from error
            module.weight = made[path]
            module.bias = None if bias is None else nn.Parameter(bias.data, requires_grad=False)

    def finish(self) -> None:
        """Mark the model as quantised. Layers without converted weights are plain ones again."""
        for name, _, plain in self._waiting.values():
            self._model.set_submodule(name, plain)
        self._waiting.clear()
        self._library.postprocess_model(self._model)

    def _refused(self, error: Exception) -> UnsupportedModelError:
        return UnsupportedModelError(f"quantization '{self._name}' does not work here: {one_line(error)}")


def quantize(model: Any, quantization: Quantization, device: torch.device) -> None:
    """Quantise a model in place, except layers on the meta device."""
    quantizer = Quantizer(model, quantization, device)
    modules = list(model.modules())
    quantizer.convert(one for one in modules if not _is_meta(quantizer.plain_of(one)))
    quantizer.finish()


def is_quantized(weight: Tensor) -> bool:
    """Return whether a weight has been quantised."""
    return getattr(weight, "quant_state", None) is not None or weight.dtype is torch.int8


def own_scales(module: nn.Module) -> list[Tensor]:
    """Return bitsandbytes' tensors for a module's own weight: statistics of four bits, scales and a view of eight."""
    weight = module._parameters.get("weight")
    if weight is None or not is_quantized(weight):
        return []
    state = getattr(weight, "quant_state", None)
    statistics = [each for each in (state, getattr(state, "state2", None)) if each is not None]
    values = [value for each in statistics for value in vars(each).values()]
    holders = (weight, getattr(module, "state", None))
    values += [getattr(holder, name, None) for holder in holders for name in ("CB", "SCB")]
    return [value for value in values if isinstance(value, Tensor)]


def keeps_inputs(part: BuiltLayer) -> bool:
    """Return whether quantised layers in `part` keep their inputs where recomputation cannot free them.

    Recomputation replaces the tensors that an operation saves through autograd. Those of bitsandbytes with eight bits
    are attributes of the operation.
    """
    given: list[StorageWeakRef] = []

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        computed = (tensor for tensor in args if isinstance(tensor, Tensor) and tensor.grad_fn is not None)
        given.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in computed)

    layers = [module for module in part.module.modules() if own_scales(module)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda _: torch.empty(0), lambda tensor: tensor):
            outputs = part.forward()
    finally:
        for hook in hooks:
            hook.remove()
    gc.collect()
    returned = {StorageWeakRef(tensor.untyped_storage()) for tensor in outputs}
    return any(not storage.expired() for storage in given if storage not in returned)


def scales_of(module: nn.Module) -> list[Tensor]:
    """Return the tensors of quantised weights in `module` that are neither parameters nor buffers."""
    return [tensor for part in module.modules() for tensor in own_scales(part)]


def held_tensors(module: nn.Module) -> list[Tensor]:
    """Return every tensor that `module` holds: parameters, buffers, and the scales of quantised weights."""
    return [*module.parameters(), *module.buffers(), *scales_of(module)]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct storages that are on a device."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors if not one.is_meta}
    return sum(storages.values())


def _is_meta(module: nn.Module) -> bool:
    return any(weight.is_meta for weight in module.parameters(recurse=False))


def add_adapters(model: Any, spec: LoRASpec, *, is_quantized: bool = False) -> None:
    """Wrap the modules that `spec` names in `model` in place with `peft.get_peft_model`, and freeze everything else.

    Both matrices of an adapter are random, as they are after the first steps. But peft starts with a zero matrix, whose
    partner gets no gradient. Adapters of half-precision weights are in float32, which is peft's default. If the model
    `is_quantized`, it is prepared as by peft: other weights are cast to float32, and embeddings hand on a gradient.

    Raises:
        UnsupportedModelError: peft is missing or refuses the model, or a name matches nothing.
    """
    try:
        import peft  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise UnsupportedModelError(f"LoRA needs the peft library: pip install peft ({one_line(error)})") from error
    if spec.target_modules == LINEAR_MODULES:
        spec = spec.model_copy(update={"target_modules": _linear_modules(model)})
    asked = {name: value for name, value in lora_arguments(spec).items() if name in _NAMED}
    with quiet_library():
        try:
            if is_quantized:
                prepare: Any = peft.prepare_model_for_kbit_training
                prepare(model, use_gradient_checkpointing=False)
                model.enable_input_require_grads()
            config = peft.LoraConfig(**lora_arguments(spec), init_lora_weights=False)
            wrapped = peft.get_peft_model(model, config)
        except Exception as error:  # peft raises errors of many kinds
            if is_out_of_memory(error):
                raise
            fields = ", ".join(f"training.lora.{name} {_listed(names)}" for name, names in asked.items() if names)
            raise UnsupportedModelError(f"{fields}: {one_line(error)} (peft {peft.__version__})") from error
    for field, missing in _unmatched(spec, wrapped, config).items():
        if missing:
            what = "parameter" if field == "target_parameters" else "module"
            text = f"training.lora.{field}: {type(model).__name__} has no {what} called {_listed(missing)}"
            raise UnsupportedModelError(f"{text} (peft {peft.__version__})")


def adapted_weights(model: nn.Module) -> dict[str, int]:
    """Return the number of weights that peft trains by the last names of their modules; empty without adapters."""
    found: Counter[str] = Counter()
    for path, weight in model.named_parameters():
        module, *is_added = re.split(r"(?:\.base_layer)*\.(?:lora_|modules_to_save\.)", path, maxsplit=1)
        if is_added and weight.requires_grad:
            found[module.rsplit(".", 1)[-1]] += weight.numel()
    return dict(found)


def _linear_modules(model: Any) -> tuple[str, ...]:
    """Return the last names of the linear layers, but the output layer, in the order of the model."""
    output = model.get_output_embeddings()
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear) and module is not output]
    if not paths:
        raise UnsupportedModelError(f"{type(model).__name__} has no linear layers: name training.lora.target_modules")
    return tuple(dict.fromkeys(path.rsplit(".", 1)[-1] for path in paths))


_NAMED = ("target_modules", "target_parameters", "modules_to_save")


def _unmatched(spec: LoRASpec, wrapped: Any, config: Any) -> dict[str, list[str]]:
    """The names that match no module, by field. peft refuses a list only if all of its names match nothing.

    peft replaces names of experts that the library has merged into one tensor; those are no longer in `config`.
    """
    parameters = wrapped.base_model.targeted_parameter_names
    targeted = [*wrapped.base_model.targeted_module_names, *parameters]
    saved = [path.split(".modules_to_save.")[0] for path, _ in wrapped.named_modules() if ".modules_to_save." in path]
    names = () if spec.target_modules is None or isinstance(spec.target_modules, str) else spec.target_modules
    return {
        "target_modules": _without([name for name in names if name in config.target_modules], targeted),
        "target_parameters": _without(spec.target_parameters or (), parameters),
        "modules_to_save": _without(spec.modules_to_save or (), saved),
    }


def _without(names: Iterable[str], paths: Iterable[str]) -> list[str]:
    known = list(paths)
    return [name for name in names if not any(path == name or path.endswith(f".{name}") for path in known)]


def _listed(names: str | list[str] | tuple[str, ...]) -> str:
    return names if isinstance(names, str) else ", ".join(f"'{name}'" for name in names)
