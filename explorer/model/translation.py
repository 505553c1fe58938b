"""Translates a foreign configuration into the native format, field by field, so that no field is dropped unnoticed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bexp.explorer.model.spelling import shortened

Location = tuple[str | int, ...]
"""Keys and indices from the top of a document."""
Problem = tuple[Location, str]
"""A location, and what is wrong there."""
MAX_NAMED_KEYS = 12


@dataclass
class Translation:
    """A request in the native format, the source of each of its values, and what could not be translated.

    `problems` is a set in the order of insertion. `ignored` are unknown fields that change nothing.
    `notes` name fields that are read in another way than a person might expect.
    """

    document: dict[str, Any] = field(default_factory=dict)
    sources: dict[Location, Location] = field(default_factory=dict)
    problems: dict[Problem, None] = field(default_factory=dict)
    ignored: list[Location] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def put(self, target: Location, value: Any, source: Location | None = None) -> None:
        """Set the native field `target`; `source` is its location in the document."""
        section = self.document
        for key in target[:-1]:
            section = section.setdefault(str(key), {})
        section[str(target[-1])] = value
        if source is not None:
            self.sources[target] = source

    def get(self, *target: str) -> Any:
        """Return the native field `target`, or None if it is not set."""
        value: Any = self.document
        for key in target:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def refuse(self, location: Location, reason: str) -> None:
        """Note a problem, once."""
        self.problems[location, reason] = None

    def note_unknown(self, keys: Sequence[str]) -> None:
        """Note fields that may change anything, in one text if there are any."""
        if keys:
            more = f" and {len(keys) - MAX_NAMED_KEYS} more" if len(keys) > MAX_NAMED_KEYS else ""
            named = ", ".join(map(shortened, keys[:MAX_NAMED_KEYS]))
            self.notes.append(f"not read, because it is not known here what they change: {named}{more}")

    def notices(self) -> list[str]:
        """Return the notes, after one text for all ignored fields if there are any."""
        if not self.ignored:
            return self.notes
        named = ", ".join(shortened(".".join(map(str, location))) for location in self.ignored[:MAX_NAMED_KEYS])
        more = len(self.ignored) - MAX_NAMED_KEYS
        return [
            f"ignored, because they change nothing: {named}{f' and {more:,} more' if more > 0 else ''}",
            *self.notes,
        ]

    def section(self, values: Any, location: Location) -> Section:
        """Return the section of `values` at `location`. Null is empty; anything else but a mapping is a problem."""
        if values is not None and not isinstance(values, Mapping):
            self.refuse(location, f"must be a mapping, not {shortened(repr(values))}")
            values = None
        return Section(self, values or {}, location)


@dataclass
class Section:
    """One mapping of a document, and those of its fields that have been read."""

    translation: Translation
    values: Mapping[str, Any]
    location: Location
    read: set[str] = field(default_factory=set)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def at(self, key: str) -> Location:
        """Return the location of a field of this section."""
        return (*self.location, key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field's value, or `default` if the field is absent; null is a value and may mean something else."""
        self.read.add(key)
        return self.values.get(key, default)

    def section(self, key: str) -> Section:
        """Return the mapping under `key`, empty if there is none."""
        return self.translation.section(self.get(key), self.at(key))

    def integer(self, key: str, default: int | None = None, *, largest: int = 1 << 31) -> int | None:
        """Return a whole number from 0 to `largest`; None if it is absent, or, with a problem noted, invalid."""
        value = self.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
            self.refuse(key, f"must be a whole number from 0 to {largest}")
            return None
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        """Return a truth value; the text `true` or `false`, which a quoted True in YAML gives, counts as one."""
        value = self.get(key, default)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
            return default
        return value

    def choice(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        """Return the value of the field's text in `choices`."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in choices:
            self.refuse(key, f"{shortened(repr(value))} is not supported; supported: {', '.join(choices)}")
            return choices[default]
        return choices[value]

    def take(self, key: str, target: Location, default: Any = None) -> None:
        """Copy a field unchanged; the native rules check its value."""
        self.translation.put(target, self.get(key, default), self.at(key))

    def refuse(self, key: str, reason: str) -> None:
        """Note a problem with a field."""
        self.translation.refuse(self.at(key), reason)

    def refuse_where_set(self, reasons: Mapping[str, str]) -> None:
        """Refuse each of these fields unless it is absent, null, false, zero or empty."""
        for key, reason in reasons.items():
            if not is_unset(self.get(key)):
                self.refuse(key, reason)

    def ignore(self, keys: Collection[str]) -> None:
        """Mark fields as read, because they are known to change nothing that is measured."""
        self.read.update(keys)

    def refuse_unread(self, reason: str, defaults: Mapping[str, Any] | None = None) -> None:
        """Refuse every field that nothing has read, because an unknown field may change what is measured.

        A field that is unset, or equal to its default in `defaults`, changes nothing: it is noted as ignored.
        """
        known = defaults or {}
        for key, value in self.values.items():
            if key in self.read:
                continue
            if is_unset(value) or (key in known and known[key] == value):
                self.translation.ignored.append(self.at(key))
            else:
                self.refuse(key, reason)


def put_dtype(translation: Translation, name: str, source: Location) -> None:
    """Set the dtype of the model, which is a config.json or shapes."""
    config = translation.get("hf_config")
    if isinstance(config, Mapping):
        others = {key: value for key, value in config.items() if key != "torch_dtype"}  # its older name
        translation.put(("hf_config",), {**others, "dtype": name}, source)
    else:
        translation.put(("model", "dtype"), name, source)


def is_unset(value: Any) -> bool:
    """Return whether a value asks for nothing: null, false, zero, or empty."""
    return value is None or value is False or value in (0, "", [], {}, ())
