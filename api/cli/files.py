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
from bexp.explorer.trainers.keys import Setting
from bexp.explorer.trainers.registry import FILES

HF_CONFIG = "config.json"
CONFIG_SUFFIXES = {".json", ".yaml", ".yml", ".txt", ".sh"}


def read_document(config: Path) -> Any:
    """Return the document in a file.

    Raises FormatError if it is neither YAML nor JSON, and CommandError if it cannot be read.
    """
    return load_document(_read(config))


def with_model(document: Any, trainer: str | None, model: Path | None, folder: Path) -> Any:
    """Return a trainer's own file together with the files that it names; other documents as they are.

    These are the config.json of its base model, and DeepSpeed's JSON, below the `folder` of the file or below that of
    the command. The command names the `trainer`, and `model`, a config.json or its folder.

    Raises FormatError if it may be the file of several trainers, and CommandError if there is no config.json.
    """
    name = find_trainer(document, trainer) if isinstance(document, dict) else None
    if name is not None:
        stated = base_model(name, document)
        document = _with_deepspeed(document, name, folder)
        return {name: document, "model": {"_name_or_path": stated, **read_document(model or _local_model(stated))}}
    if model is not None:
        raise CommandError(ExitCode.USAGE, "--model is for a trainer's own file, and CONFIG is none")
    return document


def _with_deepspeed(document: dict[str, Any], trainer: str, folder: Path) -> dict[str, Any]:
    """Return the document with the content of DeepSpeed's JSON in place of its path, where there is such a file."""
    keys = (name for name, known in FILES[trainer].keys.items() if known.setting is Setting.DEEPSPEED)
    key = next(keys, None)
    if key is None or not isinstance(path := document.get(key), str):
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
