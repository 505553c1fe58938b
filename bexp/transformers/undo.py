"""Changes to objects that can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

_MISSING = object()


class Changes:
    """A list of changes, each with a function that undoes it. As a context it undoes them if it is left by an error."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        """Return the list."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Undo the changes after an error, whichever it is."""
        if kind is not None:
            self.undo()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of `owner` itself. Undoing restores its old value, or removes it if there was none.

        A function that belongs to a module is best a `functools.partial` of the module's own method. A deep copy of the
        module then calls the copy's method, while a closure would still call the original's.
        """
        old = vars(owner).get(name, _MISSING)

        def undo() -> None:
            if old is _MISSING:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, old)

        setattr(owner, name, value)
        self._undo.append(undo)

    def on_undo(self, function: Callable[[], None]) -> None:
        """Call `function` when the changes are undone."""
        self._undo.append(function)

    def undo(self) -> None:
        """Undo all changes, the last one first. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
