"""Changes to objects that can be taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Changes:
    """A list of changes, each with what takes it back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of `owner` itself; undoing restores its old value, or that it had none of its own."""
        old = vars(owner).get(name, _MISSING)

        def undo() -> None:
            if old is _MISSING:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, old)

        setattr(owner, name, value)
        self._undo.append(undo)

    def on_undo(self, function: Callable[[], None]) -> None:
        """Call `function` when the changes are taken back."""
        self._undo.append(function)

    def undo(self) -> None:
        """Take all changes back, the last one first. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
