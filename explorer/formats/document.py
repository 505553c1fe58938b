"""JSON or YAML text as plain data. All other features of YAML and Python are refused."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import yaml

from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.translation import Location, Problem

try:
    from yaml import CSafeLoader as _Base
except ImportError:  # PyYAML built without libyaml
    from yaml import SafeLoader as _Base  # type: ignore[assignment]  # the same interface

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_VALUES = 20_000
"""The most values of a document, collections and YAML's keys included. Each takes time in every later step."""

MAX_DIGITS = 300
"""Python refuses to print integers of more than 4300 digits, and JSON's readers elsewhere end far below that."""

_TOO_LARGE = 10**MAX_DIGITS
_TOML = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*\[[\w.-]+\][ \t]*\n")
"""The first line of a TOML file such as torchtitan's is the name of a table."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_TOO_MANY_DIGITS = "a number has too many digits"
_TOO_MANY_VALUES = f"has more than {MAX_VALUES:,} values"

_CONFIG_KEYS = ("model", "hf_config")
"""The fields of a request that may hold a Hugging Face config.json."""
_NO_LIMIT = [0.0, math.inf]


class FormatError(ValueError):
    """A document that cannot become a request.

    `errors` pairs the location of each field at fault, as keys and indices from the top of the document, with the
    reason. The location is empty if the document as a whole is at fault.
    """

    def __init__(self, errors: Sequence[Problem]) -> None:
        self.errors: list[Problem] = list(errors)
        super().__init__("; ".join(describe_problem(problem) for problem in self.errors))


def describe_problem(problem: Problem) -> str:
    """Return one line for a person: `model.moe.top_k: must not exceed num_experts`."""
    location, message = problem
    return f"{'.'.join(map(str, location))}: {message}" if location else message


def read_field(assignment: str) -> tuple[str, Any]:
    """Return the name and the value of a field that is written as `FIELD=VALUE`; the value is read as YAML.

    Raises ValueError for text without "=" or without a value, and FormatError for a value that is no YAML.
    """
    name, separator, value = assignment.partition("=")
    if not separator or not name:
        raise ValueError(f"{assignment!r} is not of the form FIELD=VALUE")
    if not value.strip():
        raise ValueError(f"{assignment!r} has no value")
    try:
        return name, load_document(f"value: {value}")["value"]
    except FormatError as error:
        raise FormatError([((name,), message) for _, message in error.errors]) from None


def load_document(text: str) -> dict[str, Any]:
    """Parse a JSON or YAML mapping.

    Aliases of YAML are resolved, and merge keys (`<<`) mean what YAML 1.1 says. The limits hold for the document with
    each alias written out. Text that begins with `--` is read as Megatron's flags: `{"megatron": text}`. A config.json
    may hold `time_step_limit: [0.0, Infinity]`, which is left out.

    Raises:
        FormatError: not JSON or YAML; larger than 256 KiB; nested deeper than 32; more than 20,000 values; a tag or a
            second document; an alias without an anchor, or of what contains it; a duplicate key; a key that is not
            text; NaN, an infinity, an integer of more than 300 digits, NUL or a lone surrogate anywhere; or anything
            but a mapping at the top.
    """
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise FormatError([((), f"larger than {MAX_BYTES // 1024} KiB")])
    try:
        if text.lstrip().startswith("--") and not text.lstrip().startswith("---"):
            if reason := _refuse_text(text):
                raise FormatError([((), f"contains {reason}")])
            return {"megatron": text}
        if _TOML.match(text):
            return _parse_toml(text)
        data = _parse_json(text) if re.match(r"\s*{\s*[\"}]", text) else _parse_yaml(text)
    except RecursionError:
        raise FormatError([((), f"nested deeper than {MAX_DEPTH} levels")]) from None
    if data is None:
        raise FormatError([((), "is empty")])
    if not isinstance(data, dict):
        raise FormatError([((), f"must be a mapping of field names to values, not {_describe(data)}")])
    _check_number_of_values(data)
    data = _without_endless_limit(data)
    problems = list(islice(find_problems(data), 20))
    if problems:
        raise FormatError(problems)
    return data


def _without_endless_limit(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` without `time_step_limit: [0.0, Infinity]`, the default that Mamba's config.json states."""
    nested = {key: _without_endless_limit(data[key]) for key in _CONFIG_KEYS if isinstance(data.get(key), dict)}
    return {key: value for key, value in {**data, **nested}.items() if (key, value) != ("time_step_limit", _NO_LIMIT)}


def _check_number_of_values(data: Any) -> None:
    number, collections = 1, [data]
    while collections:
        collection = collections.pop()
        number += len(collection)
        if number > MAX_VALUES:
            raise FormatError([((), _TOO_MANY_VALUES)])
        inner = collection.values() if isinstance(collection, dict) else collection
        collections += [value for value in inner if isinstance(value, dict | list)]


def find_problems(data: Any) -> Iterator[Problem]:
    """Yield the values that no document may contain: odd numbers, texts or types, and too deep a nesting."""
    left: list[tuple[Location, Any]] = [((), data)]
    while left:
        location, value = left.pop()
        if len(location) >= MAX_DEPTH:
            yield location, f"nested deeper than {MAX_DEPTH} levels"
        elif isinstance(value, dict):
            odd = {key: reason for key in value if (reason := _refuse_key(key))}
            yield from ((location, reason) for reason in odd.values())
            left += [((*location, key), value[key]) for key in reversed(value) if key not in odd]
        elif isinstance(value, list | tuple):
            left += [((*location, index), value[index]) for index in reversed(range(len(value)))]
        elif isinstance(value, str):
            if reason := _refuse_text(value):
                yield location, f"contains {reason}"
        elif isinstance(value, float):
            if not math.isfinite(value):
                yield location, "must be a finite number"
        elif _has_too_many_digits(value):
            yield location, _TOO_MANY_DIGITS
        elif not isinstance(value, bool | int) and value is not None:
            yield location, f"must be text, a number, true, false, null, a list or a mapping, not {_describe(value)}"


def _refuse_key(key: Any) -> str | None:
    if isinstance(key, str):
        reason = _refuse_text(key)
        return reason and f"a key contains {reason}"
    return _TOO_MANY_DIGITS if _has_too_many_digits(key) else f"the key {shortened(repr(key))} must be text: quote it"


def _has_too_many_digits(data: Any) -> bool:
    return isinstance(data, int) and abs(data) >= _TOO_LARGE


def _refuse_text(text: str) -> str | None:
    if "\0" in text:
        return "a NUL character"
    if not text.isascii() and _SURROGATE.search(text):
        return "a lone surrogate"
    return None


def _describe(data: Any) -> str:
    names = {list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(data), type(data).__name__)


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FormatError([((), f"not valid TOML: {error}")]) from None
    if problems := list(islice(find_problems(data), 20)):
        raise FormatError(problems)
    _check_number_of_values(data)
    return data


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        try:
            return _parse_yaml(text)  # a YAML flow mapping may look the same at first
        except FormatError as other:
            if "not valid YAML" not in str(other):
                raise
            raise FormatError([((), f"not valid JSON: {error}")]) from other
    except FormatError:
        raise
    except ValueError:  # beyond Python's limit for the conversion of text to an integer
        raise FormatError([((), _TOO_MANY_DIGITS)]) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise FormatError([((), f"duplicate key {shortened(repr(key))}")])
        mapping[key] = value
    return mapping


class _Loader(_Base):
    """PyYAML's safe loader without dates (they stay text), and with duplicate keys and endless integers refused."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the name and the form are PyYAML's
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":value"))]
        for first, resolvers in _Base.yaml_implicit_resolvers.items()
    }

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace merge keys by the merged entries, after a comparison of the written keys.

        An anchored mapping comes here for each mapping that merges it. By then merged entries may repeat its own keys,
        so each mapping is compared only once.
        """
        compared: set[int] = self.__dict__.setdefault("compared", set())
        if id(node) not in compared:
            compared.add(id(node))
            _refuse_duplicates(node)
        super().flatten_mapping(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MAX_DIGITS:  # digits to the base of 60 take a time that grows with their square
            raise FormatError([((), _TOO_MANY_DIGITS)])
        return super().construct_yaml_int(node)

    yaml_constructors = _Base.yaml_constructors | {"tag:yaml.org,2002:int": construct_yaml_int}


def _refuse_duplicates(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else repr(key.tag)
        if name in seen:
            raise FormatError([((), f"duplicate key {shortened(repr(name))} in line {key.start_mark.line + 1}")])
        seen.add(name)


def _parse_yaml(text: str) -> Any:
    try:
        check = EventCheck()
        for event in yaml.parse(text, Loader=_Loader):
            check.take(event)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of the safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise FormatError([((), f"not valid YAML{where}: {error.problem or error.context}")]) from None
    except yaml.YAMLError as error:
        raise FormatError([((), f"not valid YAML: {' '.join(str(error).split())}")]) from None
    except FormatError:
        raise
    except (ValueError, OverflowError):  # beyond Python's limit for the conversion of text to an integer
        raise FormatError([((), _TOO_MANY_DIGITS)]) from None


@dataclass
class _Extent:
    """The size of a value once its aliases are resolved; `height` counts the levels of its collections."""

    values: int = 0
    characters: int = 0
    height: int = 0


@dataclass
class _Open:
    """A collection that has not ended: its anchor, and the totals before it."""

    anchor: str | None
    before: _Extent
    height: int = 1


@dataclass
class EventCheck:
    """Refuses a document by its events, before anything is composed. Each alias counts as the value that it names."""

    total: _Extent = field(default_factory=_Extent)
    documents: int = 0
    opened: list[_Open] = field(default_factory=list)
    anchors: dict[str, _Extent] = field(default_factory=dict)

    def take(self, event: yaml.Event) -> None:
        """Count one event.

        Raises:
            FormatError: a tag, a second document, an alias without an anchor or inside its own value, or too large a
                document.
        """
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            self._add(self._resolve(str(event.anchor), line), line)
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            if event.tag is not None:
                raise FormatError([((), f"the tag {shortened(event.tag)} in line {line} is not allowed")])
            self._begin(event, line)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._end()
        elif isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise FormatError([((), f"a second document starts in line {line}")])

    def _begin(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, line: int) -> None:
        if event.anchor is not None and (event.anchor in self.anchors or event.anchor in self._open_anchors()):
            raise FormatError([((), f"the anchor &{shortened(event.anchor)} in line {line} is given a second time")])
        if isinstance(event, yaml.ScalarEvent):
            extent = _Extent(1, len(event.value))
            if event.anchor is not None:
                self.anchors[event.anchor] = extent
            self._add(extent, line)
        else:
            self.opened.append(_Open(event.anchor, replace(self.total)))
            self._add(_Extent(1), line)

    def _end(self) -> None:
        ended = self.opened.pop()
        if self.opened:
            self.opened[-1].height = max(self.opened[-1].height, ended.height + 1)
        if ended.anchor is not None:
            self.anchors[ended.anchor] = _Extent(
                self.total.values - ended.before.values, self.total.characters - ended.before.characters, ended.height
            )

    def _open_anchors(self) -> set[str]:
        return {collection.anchor for collection in self.opened if collection.anchor is not None}

    def _resolve(self, anchor: str, line: int) -> _Extent:
        if anchor in self._open_anchors():
            raise FormatError([((), f"the alias *{shortened(anchor)} in line {line} stands for what contains it")])
        if anchor not in self.anchors:
            raise FormatError([((), f"the alias *{shortened(anchor)} in line {line} has no anchor before it")])
        return self.anchors[anchor]

    def _add(self, extent: _Extent, line: int) -> None:
        self.total.values += extent.values
        self.total.characters += extent.characters
        if self.opened:
            self.opened[-1].height = max(self.opened[-1].height, extent.height + 1)
        if self.total.values > MAX_VALUES:
            raise FormatError([((), _TOO_MANY_VALUES)])
        if self.total.characters > MAX_BYTES:
            raise FormatError([((), f"larger than {MAX_BYTES // 1024} KiB once its aliases are resolved")])
        if len(self.opened) + extent.height > MAX_DEPTH:
            raise FormatError([((), f"nested deeper than {MAX_DEPTH} levels in line {line}")])
