"""Configurations as they are submitted: a path, the text of a file, or an object."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Configuration = str | Path | Mapping[str, Any]


def read_configuration(config: Configuration, /, **fields: Any) -> dict[str, Any]:
    """Return the document of a request: a mapping, a path to YAML or JSON, or text with several lines or a brace.

    `fields` replace fields of the request that are at its top, and `seq_length` that of the `model`. A Hugging Face
    config.json becomes the `hf_config` of a request if there are fields, where `seq_length` stands for `hf_seq_length`.

    Raises OSError if the file cannot be read, and ValueError if it is no document.
    """
    document = _without_endless_limit(dict(config) if isinstance(config, Mapping) else _parse(_text(config)))
    if fields and "model_type" in document and "hf_config" not in document:
        document = {"hf_config": document}
    if "seq_length" in fields and "hf_config" in document:
        fields = {**fields, "hf_seq_length": fields["seq_length"]}
        del fields["seq_length"]
    model = document.get("model")
    if "seq_length" in fields and isinstance(model, Mapping) and "seq_length" in model:
        document["model"] = {**model, "seq_length": fields.pop("seq_length")}
    return {**document, **fields}


def _without_endless_limit(document: dict[str, Any]) -> dict[str, Any]:
    """Return `document` without `time_step_limit: [0.0, Infinity]` of a Mamba, its default, which JSON cannot carry."""
    return {key: value for key, value in document.items() if (key, value) != ("time_step_limit", [0.0, math.inf])}


def _text(config: str | Path) -> str:
    if isinstance(config, str) and ("\n" in config or config.lstrip().startswith("{")):
        return config
    return Path(config).read_text(encoding="utf-8")


def _parse(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        import yaml  # noqa: PLC0415 - JSON needs no parser beside Python's

        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"the configuration is neither JSON nor YAML: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("the configuration is no object of keys and values")  # noqa: TRY004 - a wrong file
    return document
