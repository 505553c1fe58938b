"""Carrying a foreign configuration over into the native shape, field by field, so that nothing is lost unnoticed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from explorer.formats.document import Location, Problem


@dataclass
class Translation:
    """A request in the native shape, where each of its values came from, and what could not be carried over."""

    document: dict[str, Any] = field(default_factory=dict)
    sources: dict[Location, Location] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def put(self, target: Location, value: Any, source: Location | None = None) -> None:
        """Set the native field `target`; `source` is where the document says so."""
        section = self.document
        for key in target[:-1]:
            section = section.setdefault(str(key), {})
        section[str(target[-1])] = value
        if source is not None:
            self.sources[target] = source

    def get(self, *target: str) -> Any:
        """The native field `target`, null where it is not set."""
        value: Any = self.document
        for key in target:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def refuse(self, location: Location, reason: str) -> None:
        """Note a problem, once."""
        if (location, reason) not in self.problems:
            self.problems.append((location, reason))

    def section(self, values: Any, location: Location) -> Section:
        """Read `values`, found at `location`; anything but a mapping is a problem, null an empty section."""
        if values is not None and not isinstance(values, Mapping):
            self.refuse(location, f"must be a mapping, not {values!r:.40}")
            values = None
        return Section(self, values or {}, location)


@dataclass
class Section:
    """One mapping of a document, and which of its fields have been read."""

    translation: Translation
    values: Mapping[str, Any]
    location: Location
    read: set[str] = field(default_factory=set)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def at(self, key: str) -> Location:
        """Location of a field of this section."""
        return (*self.location, key)

    def get(self, key: str, default: Any = None) -> Any:
        """A field's value; `default` only where the field is absent, since null may mean something else."""
        self.read.add(key)
        return self.values.get(key, default)

    def section(self, key: str) -> Section:
        """The mapping under `key`, empty where there is none."""
        return self.translation.section(self.get(key), self.at(key))

    def integer(self, key: str, default: int | None = None, *, largest: int = 1 << 31) -> int | None:
        """A whole number from 0 to `largest` that a calculation needs; null, with a problem noted, if it is none."""
        value = self.get(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
            self.refuse(key, f"must be a whole number from 0 to {largest}")
            return None
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        """A truth value; also the text `true` or `false`, which a quoted True in YAML gives."""
        value = self.get(key, default)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
            return default
        return value

    def choice(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        """What one of the texts in `choices` stands for."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in choices:
            self.refuse(key, f"{value!r:.40} is not supported; supported: {', '.join(choices)}")
            return choices[default]
        return choices[value]

    def take(self, key: str, target: Location, default: Any = None) -> None:
        """Carry a field over as it is; the native rules judge its value."""
        self.translation.put(target, self.get(key, default), self.at(key))

    def refuse(self, key: str, reason: str) -> None:
        """Note a problem with a field."""
        self.translation.refuse(self.at(key), reason)

    def refuse_where_set(self, reasons: Mapping[str, str]) -> None:
        """Refuse each of these fields unless it is absent, null, false, zero or empty."""
        for key, reason in reasons.items():
            value = self.get(key)
            if not _says_nothing(value):
                self.refuse(key, reason)

    def ignore(self, keys: Collection[str]) -> None:
        """Mark fields as understood to have no bearing."""
        self.read.update(keys)

    def refuse_unread(self, reason: str) -> None:
        """Refuse every field that nothing has read: an unknown field may change what is being measured."""
        for key in self.values:
            if key not in self.read:
                self.refuse(key, reason)


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or value in (0, "", [], {}, ())
