"""LoRA adapters on the frozen weights of a model, as the peft library adds them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from bexp.explorer.model.training import LINEAR_MODULES, LoRASpec, lora_arguments
from bexp.workers.targets.transformers.config import UnsupportedModelError, one_line, quiet_library


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
