"""The size of a YAML document, taken from its events: what its aliases stand for counts at each of them.

The time is proportional to the text, whatever the aliases stand for. A small text of huge meaning is refused at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import yaml

from bexp.explorer.model.spelling import shortened


class RefusedError(Exception):
    """A document that is too large, or that has something that plain data does not need."""


@dataclass
class _Extent:
    """How much a value is once its aliases are resolved; `height` is the levels of collections in it."""

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
    """Refuses a document by its events, before anything is composed: each alias counts as what it stands for."""

    max_values: int
    max_characters: int
    max_depth: int
    total: _Extent = field(default_factory=_Extent)
    documents: int = 0
    opened: list[_Open] = field(default_factory=list)
    anchors: dict[str, _Extent] = field(default_factory=dict)

    def take(self, event: yaml.Event) -> None:
        """Count one event.

        Raises:
            RefusedError: a tag, a second document, an alias of nothing or of what contains it, or too large a document.
        """
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            self._add(self._resolve(str(event.anchor), line), line)
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            if event.tag is not None:
                raise RefusedError(f"the tag {shortened(event.tag)} in line {line} is not allowed")
            self._begin(event, line)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._end()
        elif isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise RefusedError(f"a second document starts in line {line}")

    def _begin(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, line: int) -> None:
        if event.anchor is not None and (event.anchor in self.anchors or event.anchor in self._open_anchors()):
            raise RefusedError(f"the anchor &{shortened(event.anchor)} in line {line} is given a second time")
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
            raise RefusedError(f"the alias *{shortened(anchor)} in line {line} stands for what contains it")
        if anchor not in self.anchors:
            raise RefusedError(f"the alias *{shortened(anchor)} in line {line} has no anchor before it")
        return self.anchors[anchor]

    def _add(self, extent: _Extent, line: int) -> None:
        self.total.values += extent.values
        self.total.characters += extent.characters
        if self.opened:
            self.opened[-1].height = max(self.opened[-1].height, extent.height + 1)
        if self.total.values > self.max_values:
            raise RefusedError(f"has more than {self.max_values:,} values")
        if self.total.characters > self.max_characters:
            raise RefusedError(f"larger than {self.max_characters // 1024} KiB once its aliases are resolved")
        if len(self.opened) + extent.height > self.max_depth:
            raise RefusedError(f"nested deeper than {self.max_depth} levels in line {line}")
