"""A trainer's own file with the settings of an export in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.files import with_contents
from bexp.api.cli.yaml_lines import UnchangeableError, change_values, read_values
from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.formats.training_files import is_said, setting_of, why_refused
from bexp.explorer.model.model import DType
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.explorer.model.training import lora_arguments
from bexp.explorer.model.translation import is_unset
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.trainers.accelerate import ACCELERATE
from bexp.explorer.trainers.document import WHAT_ELSE
from bexp.explorer.trainers.fsdp import PREFIX, RECOMPUTES
from bexp.explorer.trainers.keys import Setting
from bexp.explorer.trainers.registry import FORMATS

ENGINES = {Setting.DEEPSPEED, Setting.FSDP, Setting.FSDP_CONFIG, Setting.FSDP_VERSION, Setting.LAUNCH}
"""The keys that say what is sharded."""
ANY_MODEL = {"model_type": "llama", "dtype": DType.BFLOAT16.value}
"""Stands for a model of shapes: what a file says of the training does not depend on it."""


def exported_into(path: Path, trainer: str, exported: str, request: ExplorationRequest) -> tuple[str, list[str]]:
    """Return the text of a trainer's file with the values of an `exported` YAML or JSON, and the export's comments.

    Comments, order and spelling of the file stay. A key of the file that sets the same, such as an older name, becomes
    null. So do adapters and quantisation if the `request` of the exploration has none.

    Raises CommandError if the file cannot be read, or not be changed value by value, or if it then describes another
    training than was measured.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:  # its ends of lines stay
            text = file.read()
        old, new = read_values(text), read_values(exported)
        if any(setting_of(trainer, key) is Setting.OPTIMIZER and new.get(key) == old[key] for key in old):
            new.pop("optim_args", None)  # the file's own momentum is a choice of training, not of speed
        keeps, new = _keeping_engine(path, trainer, old, new, request)
        unset = set() if request.is_own_code else set(_unset(request))
        dropped = [
            key
            for key, value in old.items()
            if setting_of(trainer, key) in unset and key not in new and not is_unset(value)
        ]
        settings = {setting_of(trainer, key) for key in new} - {None}
        if Setting.STEPS in settings:
            settings.add(Setting.DEVICE_BATCH)  # a trainer takes one of both
        settings = settings - ENGINES if keeps else settings | ENGINES if settings & ENGINES else settings
        changes = {key: value for key, value in new.items() if not is_said(trainer, key, value, old)}
        changes |= dict.fromkeys(dropped)
        changes |= {
            key: None
            for key, value in old.items()
            if value is not None and key not in new and setting_of(trainer, key) in settings
        }
        changed = change_values(text, changes) if changes else text
    except OSError as error:
        raise CommandError(ExitCode.USAGE, f"{error.strerror}: {path}") from None
    except (UnchangeableError, UnicodeDecodeError) as error:
        raise CommandError(ExitCode.USAGE, f"--into {path}: {error}") from None
    if not request.is_own_code:
        merged = {**old, **changes}
        own = {key: value for key, value in merged.items() if key not in new or not why_refused(trainer, key)}
        _check_training(path, trainer, own, request)
    comments = [line[2:] for line in exported.splitlines() if line.startswith("# ") and not line.endswith(WHAT_ELSE)]
    return changed, comments + ([f"null, because it was not measured: {', '.join(dropped)}"] if dropped else [])


def _keeping_engine(
    path: Path, trainer: str, old: Mapping[str, Any], new: Mapping[str, Any], request: ExplorationRequest
) -> tuple[bool, dict[str, Any]]:
    """Return whether the `old` file shards as was measured; then the `new` settings are without those of its engine.

    Whether FSDP recomputes layers is an answer. Among the keys of FSDP, this one alone changes.
    """
    whole = with_contents(dict(old), trainer, path.parent)
    try:
        document = {trainer: whole, **_next_to(request, trainer, old)}
        level = parse_request(document, overrides=_overrides(request)).training.sharding
    except FormatError:
        return False, dict(new)
    if level is not request.training.sharding:
        return False, dict(new)
    kept = {key: value for key, value in new.items() if setting_of(trainer, key) not in ENGINES}
    key = next((key for key in new if setting_of(trainer, key) is Setting.FSDP_CONFIG), None)
    if key is None:
        return True, kept
    config = whole.get(key) or {}
    wanted = bool(new[key].get(RECOMPUTES, False))
    said = next((name for name in config if name.removeprefix(PREFIX) == RECOMPUTES), RECOMPUTES)
    if wanted is (config.get(said) is True):
        return True, kept
    if isinstance(old.get(key), str):
        raise CommandError(ExitCode.USAGE, f"--into {path}: {old[key]} is a file: put its keys here, below {key}")
    return True, {**kept, key: {**config, said: wanted}}


def _next_to(request: ExplorationRequest, trainer: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands next to a trainer's file: its model, and the configuration of its processes."""
    config = dict(request.hf_config or ANY_MODEL)
    if request.training.precision == "autocast":
        config["dtype"] = DType.FLOAT32.value  # the checkpoint's own, which a file may refer to
    is_named = any(setting_of(trainer, key) is Setting.LAUNCH for key in values)
    launch = None if is_named else request.kept.get(ACCELERATE.name)
    return {"model": config} if launch is None else {"model": config, ACCELERATE.name: launch}


def _overrides(request: ExplorationRequest) -> dict[str, Any]:
    """Return what was given outside a trainer's file."""
    own: dict[str, Any] = {"num_devices": request.num_devices}
    if request.lengths is not None:
        own["lengths"] = request.model_dump(mode="json", include={"lengths"})["lengths"]
    return own


def check_into(export_format: str | None) -> None:
    """Raise CommandError unless an export's settings are keys of a trainer's own YAML."""
    able = [
        name for name, known in FORMATS.items() if known.trainer.file is not None and not known.trainer.file.is_nested
    ]
    if export_format not in able:
        raise CommandError(ExitCode.USAGE, f"--into needs --format {' or '.join(able)}")


def _unset(request: ExplorationRequest) -> Iterator[Setting]:
    """Yield the settings that an exploration does not have, so that no export names them."""
    if request.training.lora is None:
        yield Setting.ADAPTERS
    if request.quantized is None:
        yield Setting.BITS
    if request.batching_of_texts == "padded":
        yield Setting.ORDER


def _check_training(path: Path, name: str, values: Mapping[str, Any], request: ExplorationRequest) -> None:
    """Raise CommandError, which names the keys, unless a file trains as the `request` was measured."""
    own = _overrides(request)
    halves = any(value and setting_of(name, key) in (Setting.HALF, Setting.PURE) for key, value in values.items())
    if request.model is not None and not halves:
        own["target"] = BEXP  # the reference layers alone are measured in float32
    try:
        document = {name: with_contents(dict(values), name, path.parent), **_next_to(request, name, values)}
        read = parse_request(document, overrides=own)
    except FormatError as error:
        differences = [f"{'.'.join(map(str, location))}: {reason}" for location, reason in error.errors]
    else:
        measured, stated = _training(request, name), _training(read, name)
        differences = [
            f"{field}: {stated[field]} in the file, {value} in the exploration"
            for field, value in measured.items()
            if stated.get(field, value) != value
        ]
    if differences:
        raise CommandError(ExitCode.USAGE, f"--into {path}: it does not train as was measured", *differences)


def _training(request: ExplorationRequest, name: str) -> dict[str, Any]:
    """Return the values that the file of a trainer and an exploration must have in common."""
    lora, quantized, config = request.training.lora, request.quantized, request.hf_config or {}
    values: dict[str, Any] = {
        "training.optimizer.name": request.training.optimizer.name,
        "training.lora": "none" if lora is None else lora_arguments(lora),
        "quantization": "none" if quantized is None else quantized.name,
        "batching": request.batching_of_texts or "full sequences",
        "training.sharding": request.training.sharding.value,
    }
    dtype = config.get("dtype") or config.get("torch_dtype")
    if request.target_name == TRANSFORMERS and dtype not in (None, DType.FLOAT16):  # no file is read with float16
        values["dtype"] = dtype
        if request.trainer == name:  # otherwise Axolotl may upcast by itself
            values["training.precision"] = request.training.precision.replace("upcast", "pure")
    return values
