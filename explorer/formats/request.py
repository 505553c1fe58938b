"""Any accepted document as an ExplorationRequest, and every objection at the field that a person wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from explorer.formats import cerebras, modelzoo
from explorer.formats.document import FormatError, Location, find_problems
from explorer.formats.errors import explain, relocate
from explorer.formats.huggingface import translate_config
from explorer.formats.translation import Translation
from explorer.formats.vision import refuse_vision
from explorer.spec.request import ExplorationRequest

REQUEST_FIELDS = frozenset(ExplorationRequest.model_fields) - {"model"} | {"num_csx"}
MAX_ERRORS = 50


def parse_request(document: Mapping[str, Any], *, overrides: Mapping[str, Any] | None = None) -> ExplorationRequest:
    """Read a native request, a Hugging Face config.json, or a Cerebras Model Zoo YAML.

    A config.json may be the whole document, with fields of a request beside its own, or the `model` of a native
    request or of a Cerebras run. `overrides` are merged last; its keys are fields of the native request, nested or
    dotted: `{"model.seq_length": 8192, "budget": {"max_trials": 20}}`.

    Raises:
        FormatError: with the location of every field at fault, as it is called in the document.
    """
    if not isinstance(document, Mapping):
        raise FormatError([((), "must be a mapping of field names to values")])
    changes = _nest(overrides or {})
    problems = [*find_problems(dict(document)), *find_problems(changes)]
    if problems:
        raise FormatError(problems[:MAX_ERRORS])
    translation = _translate(document, changes)
    merged = _merge(_one_device_field(translation.document, translation), changes)
    if translation.problems:
        raise FormatError(translation.problems[:MAX_ERRORS])
    sources = {target: source for target, source in translation.sources.items() if _lookup(changes, target) is _ABSENT}
    try:
        request = ExplorationRequest.model_validate(merged)
    except ValidationError as error:
        raise FormatError(explain(error, sources)[:MAX_ERRORS]) from None
    booleans = [
        (relocate(location, sources), "must not be true or false")
        for location in _find_lost_booleans(merged, request.model_dump())
    ]
    if booleans:
        raise FormatError(booleans[:MAX_ERRORS])
    return request


def _translate(document: Mapping[str, Any], changes: Mapping[str, Any]) -> Translation:
    translation = Translation()
    changed = _lookup(changes, ("model", "seq_length"))
    seq_length = None if changed is _ABSENT else changed
    found: tuple[Location, Any] | None
    if cerebras.MARKS & document.keys():
        mode = changes.get("mode")
        found = cerebras.translate_run(document, translation, str(mode) if mode is not None else None)
        beside = {key: value for key, value in document.items() if key not in cerebras.RUN_KEYS}
    elif "model" not in document and {"model_type", "architectures"} & document.keys():
        config = {key: value for key, value in document.items() if key not in REQUEST_FIELDS}
        found = ((), config)
        beside = {key: value for key, value in document.items() if key in REQUEST_FIELDS}
    else:
        found = (("model",), document["model"]) if "model" in document else None
        beside = {key: value for key, value in document.items() if key != "model"}
        if found is None and _lookup(changes, ("model",)) is _ABSENT:
            translation.refuse(("model",), "is missing: a model, or a Hugging Face config.json, is needed")
    for key, value in beside.items():
        if translation.get(key) not in (None, value) and key != "mode":
            given = ".".join(map(str, translation.sources.get((key,), ())))
            translation.refuse((key,), f"is given a second time{f', beside {given}' if given else ''}")
        else:
            translation.put((key,), value)
    if found is not None:
        location, model = found
        _translate_model(location, model, translation, seq_length)
    return translation


def _translate_model(location: Location, model: Any, translation: Translation, seq_length: Any) -> None:
    if not isinstance(model, Mapping):
        translation.refuse(location, "must be a mapping of the model's shapes; a name is not looked up anywhere")
    elif "model_type" in model:
        translate_config(model, location, translation, seq_length)
    elif modelzoo.MARKS & model.keys():
        modelzoo.translate_model(model, location, translation, seq_length)
    elif {"architectures", "num_hidden_layers", "n_layer"} & model.keys():
        section = translation.section(model, location)
        if not refuse_vision(section, None):
            section.refuse("model_type", "is missing: it says what kind of Hugging Face config.json this is")
    elif not refuse_vision(translation.section(model, location), None):
        translation.put(("model",), dict(model))
        for key in model:
            translation.sources["model", key] = (*location, key)


def _one_device_field(document: dict[str, Any], translation: Translation) -> dict[str, Any]:
    """`num_csx` under its own name, so that an override meets it."""
    if "num_csx" not in document:
        return document
    rest = {key: value for key, value in document.items() if key != "num_csx"}
    if rest.setdefault("num_devices", document["num_csx"]) != document["num_csx"]:
        translation.refuse(("num_csx",), "contradicts num_devices, which is the same field")
    translation.sources.setdefault(("num_devices",), ("num_csx",))
    return rest


_ABSENT = object()


def _lookup(mapping: Mapping[str, Any], location: Location) -> Any:
    value: Any = mapping
    for key in location:
        if not isinstance(value, Mapping) or key not in value:
            return _ABSENT
        value = value[str(key)]
    return value


def _nest(overrides: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in overrides.items():
        inner: Any = _nest(value) if isinstance(value, Mapping) else value
        for part in reversed(key.split(".")):
            inner = {part: inner}
        nested = _merge(nested, inner)
    return nested


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping) and key != "micro_batch_size"
        merged[key] = _merge(old, value) if both and isinstance(old, Mapping) else value
    return merged


def _find_lost_booleans(given: Any, validated: Any, location: Location = ()) -> Iterator[Location]:
    """Where a truth value was given and a number came out: YAML's `on` is no micro-batch of 1."""
    if isinstance(given, bool):
        if isinstance(validated, int | float) and not isinstance(validated, bool):
            yield location
    elif isinstance(given, Mapping) and isinstance(validated, Mapping):
        for key, value in given.items():
            yield from _find_lost_booleans(value, validated.get(key), (*location, key))
    elif isinstance(given, list | tuple) and isinstance(validated, list | tuple):
        for index, (value, outcome) in enumerate(zip(given, validated, strict=False)):
            yield from _find_lost_booleans(value, outcome, (*location, index))
