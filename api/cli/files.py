"""The files that commands read: a configuration, a folder with a model, and the lengths of texts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.explorer.formats.document import load_document
from bexp.explorer.formats.training_files import base_model, find_trainer
from bexp.explorer.model.lengths import is_distribution, parse_lengths
from bexp.explorer.trainers.accelerate import ACCELERATE
from bexp.explorer.trainers.fsdp import ACCELERATOR_CONFIG
from bexp.explorer.trainers.keys import Setting
from bexp.explorer.trainers.registry import FILES

HF_CONFIG = "config.json"
CONFIG_SUFFIXES = {".json", ".yaml", ".yml", ".txt", ".sh"}


def read_document(config: Path) -> Any:
    """Return the document in a file.

    Raises FormatError if it is neither YAML nor JSON, and CommandError if it cannot be read.
    """
    return load_document(_read(config))


def with_model(document: Any, trainer: str | None, model: Path | None, folder: Path, launch: Path | None = None) -> Any:
    """Return a trainer's own file together with the files that it names; other documents as they are.

    These are the config.json of its base model, and the files of its sharding, below the `folder` of the file or below
    that of the command. The command names the `trainer`, and `model`, a config.json or its folder. `launch`, a
    configuration of `accelerate launch`, stands next to any document.

    Raises FormatError if it may be the file of several trainers, and CommandError if there is no config.json.
    """
    name = find_trainer(document, trainer) if isinstance(document, dict) else None
    if name is None and model is not None:
        raise CommandError(ExitCode.USAGE, "--model is for a trainer's own file, and CONFIG is none")
    if name is not None:
        stated = base_model(name, document)
        document = with_contents(document, name, folder)
        document = {name: document, "model": {"_name_or_path": stated, **read_document(model or _local_model(stated))}}
    if launch is None or not isinstance(document, dict):
        return document
    if ACCELERATE.name in document:
        raise CommandError(ExitCode.USAGE, "--accelerate is given a second time, in CONFIG")
    engine = "deepspeed_config"
    launched = read_document(launch)
    if isinstance(inner := launched.get(engine), dict):
        launched[engine] = _with_content(inner, "deepspeed_config_file", launch.parent)
    return {**document, ACCELERATE.name: launched}


def with_contents(document: dict[str, Any], trainer: str, folder: Path) -> dict[str, Any]:
    """Return a trainer's file with the files of its sharding in place of their paths, where there are such files."""
    for key, known in FILES[trainer].keys.items():
        if known.setting in (Setting.DEEPSPEED, Setting.FSDP_CONFIG, Setting.LAUNCH) or known is ACCELERATOR_CONFIG:
            document = _with_content(document, key, folder)
    return document


def _with_content(document: dict[str, Any], key: str, folder: Path) -> dict[str, Any]:
    """Return a document with the content of a file in place of its path, where there is such a file."""
    if not isinstance(path := document.get(key), str):
        return document
    found = next((each for each in (folder / path, Path(path)) if each.is_file()), None)
    return document if found is None else {**document, key: read_document(found)}


def _local_model(name: str) -> Path:
    """Return the folder or the config.json of a model on this disk, also from the cache of the hub."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    with suppress(ImportError, ValueError):  # a name that the hub could not have is a ValueError
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - optional, and slow to import

        if isinstance(cached := try_to_load_from_cache(name, HF_CONFIG), str):
            return Path(cached)
    hint = f"bexp downloads nothing: hf download {name} {HF_CONFIG} --local-dir . and then --model {HF_CONFIG}"
    raise CommandError(ExitCode.USAGE, f"the base model '{name}' is not on this disk", hint)


def read_lengths(given: str) -> Any:
    """Return the field of a request that `--lengths` stands for: a distribution, or the lengths of a file.

    Raises CommandError if the file cannot be read, or holds no lengths.
    """
    if is_distribution(given):
        return given
    try:
        return parse_lengths(_text_of(Path(given)))
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, f"--lengths {given}: {error}") from None


def _read(config: Path) -> str:
    if config.suffix == ".py":
        hints = (
            f"a script that trains: bexp tune -- python {config}",
            f"a class of your own: bexp explore REQUEST.yaml --target {config}:CLASS",
        )
        raise CommandError(ExitCode.USAGE, f"{config} is Python, not a configuration", *hints)
    return _text_of(_file_of(config))


def _text_of(path: Path) -> str:
    """Return the text of a file, or of stdin if its name is `-`. Raises CommandError if it cannot be read."""
    try:
        return typer.get_text_stream("stdin").read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CommandError(ExitCode.USAGE, f"{path} is not a text file") from None
    except OSError as error:
        raise CommandError(ExitCode.USAGE, f"{error.strerror}: {path}", *_hub_hint(path)) from None


def _file_of(config: Path) -> Path:
    """Return the config.json of a folder with a model, else the path as it is."""
    inside = config / HF_CONFIG
    return inside if inside.is_file() else config


def _hub_hint(config: Path) -> list[str]:
    """Return a hint how to get the file of a folder, of a URL, or of a possible model on the Hugging Face hub."""
    if config.is_dir():
        return [f"the folder has no {HF_CONFIG}"]
    if str(config).startswith(("http:", "https:")):
        return ["bexp reads files: download it first, for instance with curl -LO"]
    if config.exists() or config.is_absolute() or config.suffix in CONFIG_SUFFIXES or str(config).count("/") != 1:
        return []
    return [f"is it a model on the Hugging Face hub? bexp reads a file: hf download {config} {HF_CONFIG} --local-dir ."]
