"""LoRA adapters on the frozen weights of a model, as the peft library adds them."""

from __future__ import annotations

from typing import Any

from bexp.explorer.spec.training import LoRASpec
from bexp.workers.targets.transformers.config import UnsupportedModelError, one_line, quiet_library


def add_adapters(model: Any, spec: LoRASpec) -> None:
    """Wrap the named modules of `model` in place with `peft.get_peft_model`, and freeze everything else.

    Both matrices of an adapter are random, as they are after the first steps; peft's own start is a zero matrix, whose
    partner gets no gradient. Adapters of half-precision weights are in float32, which is peft's default.

    Raises:
        UnsupportedModelError: peft is missing or refuses the model, or a name matches no module.
    """
    try:
        import peft  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise UnsupportedModelError(f"LoRA needs the peft library: pip install peft ({one_line(error)})") from error
    asked = spec.target_modules
    values: dict[str, Any] = {
        "r": spec.r,
        "lora_alpha": spec.r if spec.alpha is None else spec.alpha,
        "target_modules": asked if isinstance(asked, str) else list(asked),
        "init_lora_weights": False,
    }
    with quiet_library():
        try:
            config = peft.LoraConfig(**values)
            wrapped = peft.get_peft_model(model, config)
        except Exception as error:  # peft raises errors of many kinds
            reason = f"training.lora.target_modules {_listed(asked)}: {one_line(error)}"
            raise UnsupportedModelError(f"{reason} (peft {peft.__version__})") from error
    missing = [] if isinstance(asked, str) else _unmatched(asked, wrapped, config)
    if missing:
        text = f"training.lora.target_modules: {type(model).__name__} has no module called {_listed(missing)}"
        raise UnsupportedModelError(f"{text} (peft {peft.__version__})")


def _unmatched(asked: tuple[str, ...], wrapped: Any, config: Any) -> list[str]:
    """The names that got no adapter. peft refuses a list only if all of its names match nothing.

    peft replaces names of experts that the library has merged into one tensor; those are no longer in `config`.
    """
    targeted = [*wrapped.base_model.targeted_module_names, *wrapped.base_model.targeted_parameter_names]
    kept = [name for name in asked if name in config.target_modules]
    return [name for name in kept if not any(path == name or path.endswith(f".{name}") for path in targeted)]


def _listed(names: str | list[str] | tuple[str, ...]) -> str:
    return names if isinstance(names, str) else ", ".join(f"'{name}'" for name in names)
