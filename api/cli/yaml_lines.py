"""Changes values in a YAML file in place, so that its comments, its order and its spelling stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml


class UnchangeableError(ValueError):
    """A file that is no plain mapping, or whose values cannot be changed one by one."""


def read_values(text: str) -> dict[str, Any]:
    """Return the values of a file.

    Raises UnchangeableError if it is no mapping.
    """
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UnchangeableError(f"it is no YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise UnchangeableError("it is no mapping of names to values")
    return values


def change_values(text: str, values: Mapping[str, Any]) -> str:
    """Return the text with these values at its top level. Keys that it lacks are added at its end.

    Of a mapping in lines of its own, only the values that differ are changed.

    Raises UnchangeableError if the text cannot be changed in place.
    """
    wanted = {**read_values(text), **values}
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode), "it was read as a mapping"
    newline = "\r\n" if "\r\n" in text else "\n"
    changed = text
    for begin, end, new in sorted(_places(text, root, values, newline), reverse=True):  # so that other places stay
        changed = changed[:begin] + new + changed[end:]
    named = {key.value for key, _ in root.value if isinstance(key, yaml.ScalarNode)}
    for name, value in values.items():
        if name not in named:
            changed += ("" if changed.endswith("\n") else newline) + f"{name}: {_shown(value)}{newline}"
    try:
        is_right = read_values(changed) == wanted  # aliases, for example, stand for values elsewhere
    except UnchangeableError:
        is_right = False
    if not is_right:
        raise UnchangeableError(f"{', '.join(values)} cannot be changed in it line by line")
    return changed


def _places(
    text: str, mapping: yaml.MappingNode, values: Mapping[str, Any], newline: str
) -> Iterator[tuple[int, int, str]]:
    """Yield the begin and the end of each value of a mapping that changes, and what comes there instead."""
    for key, value in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.value not in values:
            continue
        new = values[key.value]
        old = yaml.safe_load(yaml.serialize(value)) if isinstance(value, yaml.MappingNode) else None
        if isinstance(new, Mapping) and old and not value.flow_style and old.keys() <= new.keys():
            yield from _places(text, value, {name: new[name] for name in old if old[name] != new[name]}, newline)
            indent = " " * value.start_mark.column
            added = "".join(f"{newline}{indent}{name}: {_shown(new[name])}" for name in new if name not in old)
            last = text.find(newline, _end(text, value.value[-1][1]))  # after a comment in the last line
            yield from [(last, last, added) if last >= 0 else (len(text), len(text), added)] if added else []
            continue
        begin, end = value.start_mark.index, _end(text, value)
        space = "" if begin < end else " "  # a key without a value
        yield begin, end, space + _shown(new)


def _end(text: str, value: yaml.Node) -> int:
    """Return the end of a value. The mark of a block stands after the blank lines and comments that follow it."""
    begin, end = value.start_mark.index, value.end_mark.index
    return begin + len(text[begin:end].rstrip()) if isinstance(value, yaml.CollectionNode) else end


def _shown(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=1 << 20)).splitlines()[0]
