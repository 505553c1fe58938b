"""Reads any accepted document as an ExplorationRequest, or reports every problem at the field where it is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from pydantic import ValidationError

from bexp.explorer.formats import cerebras, megatron, modelzoo, nemo
from bexp.explorer.formats.document import FormatError, find_problems
from bexp.explorer.formats.errors import explain, relocate
from bexp.explorer.formats.foreign import why_foreign
from bexp.explorer.formats.huggingface import (
    OWN_FIELDS,
    assume_seq_length,
    check_length,
    keep_what_is_read,
    pass_config,
    translate_config,
)
from bexp.explorer.formats.model_types import refuse_other_model, refuse_vision
from bexp.explorer.formats.training_files import StatedTraining, translate_side_files
from bexp.explorer.model.spelling import did_you_mean, shortened
from bexp.explorer.model.target import BEXP, TRANSFORMERS, unlike_the_config
from bexp.explorer.model.training import Sharding
from bexp.explorer.model.translation import Location, Section, Translation
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.trainers.accelerate import ACCELERATE, processes_of, read_launch
from bexp.explorer.trainers.cerebras import CEREBRAS
from bexp.explorer.trainers.registry import FILES, SIDE_FILES

REQUEST_FIELDS = frozenset(ExplorationRequest.model_fields) - {"model"} | {"num_csx"}
MAX_ERRORS = 50
_BATCH = ("batch_size", "base_micro_batch_size")
LIKE_A_FIELD = 0.85
"""The least likeness of a key of config.json to a misspelt field; `text_config` is 0.83 like `target_config`."""
MAX_COMPARED = 100
"""The most keys of a config.json that are compared with fields, because that takes long. Published ones have fewer."""


def parse_request(
    document: Mapping[str, Any], *, overrides: Mapping[str, Any] | None = None, name: str | None = None
) -> ExplorationRequest:
    """Read a native request, a Hugging Face config.json, a Cerebras or NeMo YAML, or Megatron's flags.

    `deepspeed` and `training_arguments` may stand next to a model. They hold the JSON of the training side. In their
    place a trainer's own file may stand, under the trainer's name.

    A config.json may be the whole document, with fields of a request next to its own. It may also be the `model` of a
    native request or of a Cerebras run. It is translated for target `bexp`, and kept unchanged for any other target.
    `overrides` are merged last. Their keys are fields of the native request, nested or dotted:
    `{"model.seq_length": 8192, "budget": {"max_trials": 20}}`. A model of shapes without a name gets `name`, or a name
    from its kind and shapes.

    Raises FormatError if the document cannot be read. The error has the location of every field at fault.
    """
    if not isinstance(document, Mapping):
        raise FormatError([((), "must be a mapping of field names to values")])
    changes = _nest(overrides or {})
    problems = list(islice(chain(find_problems(dict(document)), find_problems(changes)), MAX_ERRORS))
    if problems:
        raise FormatError(problems)
    if (reason := why_foreign(document)) is not None:
        raise FormatError([((), reason)])
    translation = _translate(document, changes)
    merged = _merge(_one_device_field(translation.document, translation), changes)
    if translation.problems:
        raise FormatError(list(translation.problems)[:MAX_ERRORS])
    if isinstance(merged.get("model"), dict) and "name" not in merged["model"]:
        merged["model"] = {**merged["model"], "name": _name_of(name, merged["model"])}
    said = merged.get("notices", ())
    if (notices := translation.notices()) and isinstance(said, (list, tuple)):  # else the request refuses what is said
        merged["notices"] = [*said, *(notice for notice in notices if notice not in said)]
    sources = {target: source for target, source in translation.sources.items() if _lookup(changes, target) is _ABSENT}
    try:
        request = ExplorationRequest.model_validate(merged)
    except ValidationError as error:
        raise FormatError(explain(error, sources, MAX_ERRORS, is_hugging_face="hf_config" in merged)) from None
    booleans = [
        (relocate(location, sources), "must not be true or false")
        for location in islice(_find_lost_booleans(merged, request.model_dump()), MAX_ERRORS)
    ]
    if booleans:
        raise FormatError(booleans)
    return request


def _name_of(name: str | None, model: Mapping[str, Any]) -> str:
    """Return a name for a model of shapes: `name`, without forbidden characters, or such as `moe-24x2048`."""
    plain = re.sub(r"[^A-Za-z0-9._ -]|^[^A-Za-z0-9]+", "-", name or "").lstrip("-._ ")[:128]
    kind = "moe" if model.get("moe") else "dense"
    return plain or f"{kind}-{model.get('num_layers')!s:.9}x{model.get('hidden_size')!s:.9}"


def _translate(document: Mapping[str, Any], changes: dict[str, Any]) -> Translation:
    files = {key: document[key] for key in SIDE_FILES if key in document}
    own = next((name for name in FILES if name in document), None)
    translation = Translation()
    stated = None
    if own is not None:
        inner = document.get("model")
        given = (_lookup({**document, **changes}, ("hf_seq_length",)), _lookup(changes, ("model", "seq_length")))
        has_length = given != (_ABSENT, _ABSENT) or (isinstance(inner, Mapping) and "seq_length" in inner)
        stated = StatedTraining.read(own, document[own], translation, has_length=has_length)
    rest = {key: value for key, value in document.items() if key not in files and key != own}
    _translate_request(rest, translation, changes)
    if stated is not None and own is not None:
        named = _choose(changes, translation.document, "trainer")
        if named not in (None, own):  # it keeps other number formats
            reason = f"is a file of {own}, and the trainer that is named is {shortened(named)}"
            translation.refuse((own,), f"{reason}: keep one, or give its config.json")
        _refuse_second_training(own, translation, (*_BATCH, "batching"), {"precision", "optimizer", "lora"})
        if unread := files.keys() - {ACCELERATE.name}:
            reason = f"is not read next to a file of {own}: put it into that file"
            translation.problems |= {((name,), reason): None for name in sorted(unread)}
        launch = None
        if ACCELERATE.name in files:
            launch = read_launch(translation.section(files[ACCELERATE.name], (ACCELERATE.name,)))
        devices = _choose(changes, _one_device_field(translation.document, translation), "num_devices")
        has_lengths = _choose(changes, translation.document, "lengths") is not None
        has_batching = _lookup(changes, ("batching",)) is not _ABSENT
        stated.translate(translation, devices, launch=launch, has_lengths=has_lengths, has_batching=has_batching)
    elif files:
        launch_alone = files.keys() == {ACCELERATE.name}
        fields, parts = ((), {"sharding"}) if launch_alone else (_BATCH, {"precision", "optimizer", "sharding"})
        _refuse_second_training(next(iter(files)), translation, fields, parts)
        devices = _choose(changes, _one_device_field(translation.document, translation), "num_devices")
        if devices is None and (devices := processes_of(files.get(ACCELERATE.name))) is not None:
            translation.put(("num_devices",), devices, (ACCELERATE.name, "num_processes"))
        translate_side_files(files, translation, devices)
        _drop_master_weights(translation, changes)
    _unshard_one_device(translation, changes)
    return translation


def _unshard_one_device(translation: Translation, changes: Mapping[str, Any]) -> None:
    """Read a level of sharding that a file states as `none` on one device, and note it."""
    location = ("training", "sharding")
    level, source = translation.get(*location), translation.sources.get(location)
    devices = _choose(changes, _one_device_field(translation.document, translation), "num_devices")
    if source is None or level in (None, Sharding.NONE) or devices not in (None, 1):
        return
    if _lookup(changes, location) is not _ABSENT:
        return
    translation.put(location, Sharding.NONE.value, source)
    translation.notes.append(
        f"{'.'.join(map(str, source))}: {level} shards nothing on one device, which has all of the training state; "
        "for several devices say --num-devices"
    )


def _drop_master_weights(translation: Translation, changes: Mapping[str, Any]) -> None:
    """Leave out the precision `master` of a file where the overrides ask for LoRA, or for another target."""
    location = ("training", "precision")
    has_lora = _lookup(changes, ("training", "lora")) not in (_ABSENT, None)
    target = _choose(changes, translation.document, "target")
    if translation.get(*location) == "master" and (has_lora or target not in (None, TRANSFORMERS)):
        translation.put(location, "pure")


def _refuse_second_training(
    file: str, translation: Translation, fields: Collection[str], parts: Collection[str]
) -> None:
    """Refuse fields of a document that a file of the training side sets as well.

    `fields` are those of a request, `parts` those of its `training`.
    """
    training = translation.get("training")
    said = set(training) & set(parts) if isinstance(training, Mapping) else set()
    own: list[Location] = [(key,) for key in fields if key in translation.document]
    for location in own + [("training", key) for key in sorted(said)]:
        where = ".".join(map(str, relocate(location, translation.sources)))
        translation.refuse((file,), f"says what {where} says as well: keep one")
    if isinstance(training, Mapping):
        translation.put(("training",), dict(training))


def _translate_request(document: Mapping[str, Any], translation: Translation, changes: dict[str, Any]) -> None:
    located_model: tuple[Location, Any] | None
    stated = _choose(changes, document, "target")
    if "megatron" in document or nemo.is_nemo(document):
        located_model, others = None, _translate_arguments(document, changes, translation)
    elif cerebras.is_cerebras(document):
        mode = changes.get("mode")
        located_model = cerebras.translate_run(document, translation, str(mode) if mode is not None else None)
        others = {key: value for key, value in document.items() if key not in cerebras.RUN_KEYS}
        if not cerebras.BEYOND_CEREBRAS & {*others, *changes}:
            translation.put(("trainer",), CEREBRAS.name)
    elif "model" not in document and {"model_type", "architectures"} & document.keys():
        others = {key: value for key, value in document.items() if _is_request_field(key, value)}
        located_model = ((), {key: value for key, value in document.items() if key not in others})
        _note_misspelt(located_model[1], translation)
    else:
        located_model = _find_model(document, changes, translation)
        others = {key: value for key, value in document.items() if key != "model"}
    for key, value in others.items():
        if translation.get(key) not in (None, value) and key != "mode":
            given = ".".join(map(str, translation.sources.get((key,), ())))
            translation.refuse((key,), f"is given a second time{f', after {given}' if given else ''}")
        else:
            translation.put((key,), value)
    if located_model is not None:
        location, model = located_model
        _translate_model(location, model, translation, changes)
    config = translation.get("hf_config")
    if isinstance(config, Mapping):
        target = _choose(changes, translation.document, "target")
        is_transformers = target in (None, TRANSFORMERS)
        refused = target in (None, BEXP, TRANSFORMERS) and refuse_other_model(_section_of(translation), stated)
        keep_what_is_read(config, translation, by_library=is_transformers)
        if is_transformers and not refused:
            translation.notes += unlike_the_config(config, _choose(changes, translation.document, "quantization"))
        if _choose(changes, translation.document, "hf_seq_length") is None:
            assume_seq_length(config, translation)
        elif is_transformers:
            check_length(config, _choose(changes, translation.document, "hf_seq_length"), translation)


def _section_of(translation: Translation) -> Section:
    """Return the config.json of a translated request, at its place in the document."""
    location = translation.sources.get(("hf_config",), ("hf_config",))
    return translation.section(translation.get("hf_config"), location)


def _is_request_field(key: str, value: Any) -> bool:
    """Return whether a field in a config.json is a request's. A list of `num_query_groups` is."""
    return key in REQUEST_FIELDS and not (key == "num_query_groups" and isinstance(value, int))


def _note_misspelt(config: Mapping[str, Any], translation: Translation) -> None:
    """Note keys that are nearly fields of a request: transformers takes any key, so no later step does."""
    for key in islice(config, MAX_COMPARED):
        if key not in OWN_FIELDS and (meant := did_you_mean(key, REQUEST_FIELDS, LIKE_A_FIELD)):
            translation.notes.append(f"{key} is read as a key of config.json{meant}")


def _translate_arguments(
    document: Mapping[str, Any], changes: Mapping[str, Any], translation: Translation
) -> dict[str, Any]:
    """Read Megatron's flags under `megatron`, or a NeMo YAML, and return the other fields."""
    model = changes.get("model")
    given = model if isinstance(model, Mapping) else {}
    stated = {key: _choose(changes, document, key) for key in ("recompute", "execution")}
    if "megatron" not in document:
        nemo.translate_nemo(document, translation, given, stated)
        return {key: value for key, value in document.items() if key not in nemo.TOP_KEYS}
    flags = megatron.read_flags(document["megatron"], ("megatron",), translation)
    if flags is not None:
        megatron.translate_arguments(translation.section(flags, ("megatron",)), given, stated)
    return {key: value for key, value in document.items() if key != "megatron"}


def _find_model(
    document: Mapping[str, Any], changes: Mapping[str, Any], translation: Translation
) -> tuple[Location, Any] | None:
    """Return the model of a native request; a request with `hf_config`, or of a registered target, needs none."""
    target = _choose(changes, document, "target")
    needless = document.get("hf_config") is not None or target not in (None, BEXP, TRANSFORMERS)
    if document.get("model") is not None or ("model" in document and not needless):
        return ("model",), document["model"]
    if not needless and _lookup(changes, ("model",)) is _ABSENT:
        translation.refuse(("model",), "is missing: a model, or a Hugging Face config.json, is needed")
    return None


def _translate_model(location: Location, model: Any, translation: Translation, changes: dict[str, Any]) -> None:
    changed = _lookup(changes, ("model", "seq_length"))
    seq_length = translation.get("model", "seq_length") if changed is _ABSENT else changed
    if not isinstance(model, Mapping):
        translation.refuse(location, "must be a mapping of the model's shapes; a name is not looked up anywhere")
    elif "model_type" in model:
        target = _choose(changes, translation.document, "target") or TRANSFORMERS
        if target == BEXP:
            translate_config(model, location, translation, seq_length)
        else:
            translation.put(("target",), target)
            _drop_seq_length(translation)
            stated = _choose(changes, translation.document, "hf_seq_length") if seq_length is None else seq_length
            pass_config(model, location, translation, stated)
            _drop_model_changes(changes, translation)
    elif modelzoo.MARKS & model.keys():
        modelzoo.translate_model(model, location, translation, seq_length)
    elif {"architectures", "num_hidden_layers", "n_layer"} & model.keys():
        section = translation.section(model, location)
        if not refuse_vision(section, None):
            section.refuse("model_type", "is missing: it says what kind of Hugging Face config.json this is")
    elif not refuse_vision(translation.section(model, location), None):
        translation.put(("model",), (translation.get("model") or {}) | dict(model))
        for key in model:
            translation.sources["model", key] = (*location, key)


def _drop_seq_length(translation: Translation) -> None:
    """Remove the model's length that a run's input states; with a config.json it becomes `hf_seq_length`."""
    model = translation.get("model")
    if isinstance(model, dict):
        model.pop("seq_length", None)
        if not model:
            del translation.document["model"]


def _drop_model_changes(changes: dict[str, Any], translation: Translation) -> None:
    """Remove the overrides of `model`: the length has been read, and no other can be applied to a config.json."""
    model = changes.pop("model", None)
    for key in model if isinstance(model, Mapping) else ():
        if key != "seq_length":
            translation.refuse(("model", key), f"cannot be overridden for target '{translation.get('target')}'")


def _choose(changes: Mapping[str, Any], document: Mapping[str, Any], key: str) -> Any:
    """Return the override of a field, else its value in the document."""
    changed = _lookup(changes, (key,))
    return document.get(key) if changed is _ABSENT else changed


def _one_device_field(document: dict[str, Any], translation: Translation) -> dict[str, Any]:
    """Rename `num_csx` to `num_devices`, so that an override replaces it."""
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
    """Yield the fields in which a truth value was read as a number: YAML's `on` is no micro-batch of 1."""
    if isinstance(given, bool):
        if isinstance(validated, int | float) and not isinstance(validated, bool):
            yield location
    elif isinstance(given, Mapping) and isinstance(validated, Mapping):
        for key, value in given.items():
            yield from _find_lost_booleans(value, validated.get(key), (*location, key))
    elif isinstance(given, list | tuple) and isinstance(validated, list | tuple):
        for index, (value, outcome) in enumerate(zip(given, validated, strict=False)):
            yield from _find_lost_booleans(value, outcome, (*location, index))
