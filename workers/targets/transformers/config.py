"""A Hugging Face configuration, resolved by the installed transformers: no download, and no remote code."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeGuard, cast, get_args

from bexp.explorer.formats.model_types import TEXT_TWINS, TWIN_VALUES
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.config_rules import MAX_CONFIG_LAYERS, check_hugging_face_config
from bexp.explorer.model.spelling import did_you_mean, shortened
from bexp.explorer.model.target import OWN_TARGET
from bexp.transformers.layers import config_depth

MINIMUM_VERSION = (5, 0)
OWN_CLASS = f"; {OWN_TARGET}"
_NO_PART_OF_TRAINING = ("quantization_config", "architectures", "transformers_version", "_name_or_path")


class UnsupportedModelError(ValueError):
    """The installed transformers cannot build a configuration; the message has the cause and the library's version."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{reason} (transformers {library_version() or 'is not installed'})")


@dataclass(frozen=True)
class ResolvedConfig:
    """A raw configuration as the library understands it."""

    model_type: str
    config: Any
    """A PreTrainedConfig with `use_cache` off, no remote code and no quantization."""
    model_class: type
    """The class that AutoModelForCausalLM builds for it."""
    version: str
    """Of the library."""
    seq_length: int

    @property
    def text_config(self) -> Any:
        """The part of the configuration that describes the language model: `config` itself, or a nested one."""
        return self.config.get_text_config(decoder=True)

    def without_balancing_loss(self) -> ResolvedConfig:
        """Return the configuration of the parts, because the routers' balancing loss needs the routers of all layers.

        That loss is small compared with the layers: it reads one number for each token and expert.
        """
        if not getattr(self.text_config, "output_router_logits", False):
            return self
        plain = replace(self, config=copy.deepcopy(self.config))
        plain.text_config.output_router_logits = False
        return plain


def library_version() -> str | None:
    """Return the installed transformers' version; None where there is none."""
    try:
        import transformers  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        return None
    return str(transformers.__version__)


@contextmanager
def quiet_library() -> Iterator[None]:
    """Silence the library's warnings and log lines below errors within the context."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def resolve_config(raw: Mapping[str, Any], seq_length: int) -> ResolvedConfig:
    """Return `raw` (the content of a config.json) as the installed library understands it.

    Raises:
        UnsupportedModelError: transformers is missing or too old, or `raw` breaks a rule of requests. Or `raw` names a
            type that is unknown or has no causal language model. Or it has a value that the class refuses, or more than
            MAX_CONFIG_LAYERS layers.
    """
    version = _checked_version()
    kept = {name: value for name, value in raw.items() if name not in _NO_PART_OF_TRAINING}
    try:
        check_hugging_face_config(kept)
    except RuleError as error:
        places = "; ".join(".".join(path) for path in error.fields[:1])
        raise UnsupportedModelError(f"{places}: {error}") from error
    model_type: str = kept["model_type"]
    config = _build_config(model_type, kept, raw.get("architectures"))
    depth = config_depth(config)
    if depth is not None and depth > MAX_CONFIG_LAYERS:
        raise UnsupportedModelError(f"{depth} layers; at most {MAX_CONFIG_LAYERS} are allowed")
    return ResolvedConfig(model_type, config, _model_class(config, model_type), version, seq_length)


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a configuration of the same class with `values` (a dict as `to_dict` returns it), `use_cache` off.

    Raises UnsupportedModelError if the class refuses them.
    """
    arguments = {name: value for name, value in values.items() if name != "model_type"}
    with quiet_library():
        try:
            return _without_cache(type(config)(**copy.deepcopy(arguments)))
        except Exception as error:  # a configuration's own checks raise errors of any kind
            raise UnsupportedModelError(f"{type(config).__name__} refuses the values: {one_line(error)}") from error


def _without_cache(config: Any) -> Any:
    config.use_cache = False
    config.get_text_config(decoder=True).use_cache = False
    return config


def is_int(value: Any) -> TypeGuard[int]:
    """Return whether a value is a number, and not a flag."""
    return isinstance(value, int) and not isinstance(value, bool)


def one_line(error: BaseException) -> str:
    """Return the type and the message of `error` on one line of at most 300 characters."""
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()), 300)


def _checked_version() -> str:
    version = library_version()
    if version is None:
        raise UnsupportedModelError("transformers is missing: pip install 'bexp[transformers]'")
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
        raise UnsupportedModelError("transformers is too old: 5.0 or later is needed")
    return version


def _build_config(model_type: str, raw: Mapping[str, Any], architectures: Any) -> Any:
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - transformers is optional

    if model_type not in CONFIG_MAPPING:
        meant = _same_class(architectures) or did_you_mean(model_type, CONFIG_MAPPING.keys())
        raise UnsupportedModelError(f"model_type {model_type!r} is unknown to the library{meant or OWN_CLASS}")
    made = CONFIG_MAPPING[model_type]
    arguments = copy.deepcopy({name: value for name, value in raw.items() if name != "model_type"})
    for name in arguments:  # the class sets an attribute for each key that it does not know
        if callable(getattr(made, name, None)):
            raise UnsupportedModelError(f"{name} is a method of {made.__name__}, no value")
    with quiet_library():
        try:
            return _without_cache(_as_causal(made(**_with_floats(made, arguments)), model_type))
        except Exception as error:  # a configuration's own checks raise errors of any kind
            raise UnsupportedModelError(f"the configuration of {model_type!r} is refused: {one_line(error)}") from error


def _with_floats(made: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a configuration with 1.0 for 1 where its class takes no other number than a float.

    jq and JavaScript write 1.0 as 1, which the class would refuse.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - transformers is optional

    types = {each.name: each.type for each in fields(made)} if is_dataclass(made) else {}
    alone = {name for name, kind in types.items() if float in (kinds := {kind, *get_args(kind)}) and int not in kinds}
    found = {name: float(value) if name in alone and is_int(value) else value for name, value in arguments.items()}
    for name, value in found.items():
        if isinstance(value, dict):
            named = value.get("model_type")
            own = CONFIG_MAPPING[named] if named in CONFIG_MAPPING else getattr(made, "sub_configs", {}).get(name)
            found[name] = value if own is None else _with_floats(own, value)
    return found


def _as_causal(config: Any, model_type: str) -> Any:
    """Return the configuration of the causal class that computes the same on text alone, where `config` has none."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - transformers is optional

    twin = TEXT_TWINS.get(model_type)
    if twin is None:
        return config
    values = {name: value for name, value in config.to_dict().items() if name not in _NO_PART_OF_TRAINING}
    rope = values.get("rope_parameters") or {}
    values["rope_parameters"] = {name: value for name, value in rope.items() if not name.startswith("mrope")}
    del values["model_type"]
    return CONFIG_MAPPING[twin](**{**values, **TWIN_VALUES.get(twin, {})})


def _same_class(architectures: Any) -> str:
    """Advice to write another type, where `architectures` names a class of the library; empty if it names none.

    Kimi-K2, for example, is published with a type of its own, `kimi_k2`, and DeepSeek-V3's class.
    """
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415 - transformers is optional
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    named = architectures if isinstance(architectures, list) else []
    for known, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if class_name in named:
            return f"; its class {class_name} is that of model_type {known!r}: write that instead"
    return ""


def _model_class(config: Any, model_type: str) -> type:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415 - transformers is optional

    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError as error:
        raise UnsupportedModelError(f"{model_type!r} has no causal language model{OWN_CLASS}") from error
    except Exception as error:  # a module may need packages that fail in ways of their own
        raise UnsupportedModelError(f"the class of {model_type!r} cannot be imported: {one_line(error)}") from error
    return cast(type, model_class[0] if isinstance(model_class, tuple) else model_class)
