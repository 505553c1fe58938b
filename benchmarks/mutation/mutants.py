"""Mutants of a source file: mutmut's operators, applied to every node that can change what the program does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

EXCLUDED = {
    "annotations": "type annotations, the type of a cast, and imports",
    "decorators": "decorators and the bases of a class, for example frozen and slots of a dataclass",
    "docstrings": "docstrings and other strings that stand alone",
    "text": "text for people: f-strings, strings with a space, and arguments that consist of one",
    "logging": "calls of a logger",
    "declarations": "__all__, __slots__ and the strict argument of zip",
    "builtins": "the arguments of len and isinstance: without them every call fails",
    "duplicates": "mutants whose text is the original's or another mutant's",
}
ALWAYS_FAIL = ("len", "isinstance")


@dataclass(frozen=True)
class Mutant:
    """One changed node.

    `lines` are those of its statement; `imported` says that the node runs when the module is imported, not when a
    function is called. `source` gives the text of the whole changed file.
    """

    path: str
    line: int
    column: int
    lines: tuple[int, int]
    imported: bool
    operator: str
    before: str
    after: str
    source: Callable[[], str]

    @property
    def key(self) -> str:
        """What names this mutant in the log of a run."""
        return "|".join((self.path, f"{self.line}:{self.column}", self.operator, self.before, self.after))


class MutantFinder:
    """Finds the mutants of one file. `excluded` counts the nodes that a rule leaves out.

    It needs mutmut and libcst, which are no dependencies of the project.
    """

    def __init__(self, root: Path, path: str) -> None:
        import libcst  # noqa: PLC0415 - only a mutation run needs it
        from libcst.metadata import MetadataWrapper, PositionProvider  # noqa: PLC0415 - an optional tool, for this function alone
        from mutmut.mutation.mutators import mutation_operators  # noqa: PLC0415 - an optional tool, for this function alone

        self.excluded: Counter[str] = Counter()
        self._cst: Any = libcst
        self._operators: Any = mutation_operators
        self._path = path
        wrapper = MetadataWrapper(libcst.parse_module((root / path).read_text()))
        self._module: Any = wrapper.module
        self._positions: Any = wrapper.resolve(PositionProvider)

    def find(self) -> Iterator[Mutant]:
        """Every mutant once, in the order of the source."""
        seen: set[str] = set()
        for node, lines, imported in self._nodes(self._module, (0, 0), imported=True):
            start = self._positions[node].start if node in self._positions else None
            line, column = (start.line, start.column) if start else (lines[0], 0)
            where = (line, column, lines if lines[0] else (line, line), imported)
            before = self._text(node)
            for operator in (operator for kind, operator in self._operators if isinstance(node, kind)):
                for changed in operator(node):
                    source = partial(self._source, node, changed)
                    mutant = Mutant(self._path, *where, operator.__name__, before, self._text(changed), source)
                    if mutant.after == before or mutant.key in seen:
                        self.excluded["duplicates"] += 1
                    elif self._drops_text(node, changed):
                        self.excluded["text"] += 1
                    elif operator.__name__ == "operator_arg_removal" and self._text(node.func) in ALWAYS_FAIL:
                        self.excluded["builtins"] += 1
                    else:
                        seen.add(mutant.key)
                        yield mutant

    def _nodes(self, node: Any, lines: tuple[int, int], imported: bool) -> Iterator[tuple[Any, tuple[int, int], bool]]:
        cst = self._cst
        if (rule := self._rule(node)) is not None:
            self.excluded[rule] += 1
            return
        if isinstance(node, cst.SimpleStatementLine):
            where = self._positions[node]
            lines = (where.start.line, where.end.line)
        elif isinstance(node, cst.BaseCompoundStatement):
            lines = (0, 0)
        yield node, lines, imported
        for child in node.children:
            inside = imported and not (isinstance(node, cst.FunctionDef) and child is node.body)
            if isinstance(node, cst.ClassDef) and child is not node.body:
                self.excluded["decorators"] += 1
            else:
                yield from self._nodes(child, lines, inside)

    def _rule(self, node: Any) -> str | None:
        """The rule that leaves this node and what is below it out; None if none does."""
        cst = self._cst
        if isinstance(node, (cst.Annotation, cst.Import, cst.ImportFrom, cst.TypeAlias)):
            return "annotations"
        if isinstance(node, cst.If) and self._text(node.test) == "TYPE_CHECKING":
            return "annotations"
        if isinstance(node, cst.Decorator):
            return "decorators"
        if isinstance(node, cst.Expr) and isinstance(node.value, (cst.SimpleString, cst.ConcatenatedString)):
            return "docstrings"
        if self._is_text(node):
            return "text"
        if isinstance(node, cst.Call):
            name = self._text(node.func).lower()
            if name == "cast":
                return "annotations"
            if name.split(".")[0].strip("_") in ("logger", "log", "logging"):
                return "logging"
        if isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "strict":
            return "declarations"
        if isinstance(node, cst.Assign) and self._text(node.targets[0].target) in ("__all__", "__slots__"):
            return "declarations"
        return None

    def _is_text(self, node: Any) -> bool:
        cst = self._cst
        if isinstance(node, (cst.FormattedString, cst.ConcatenatedString)):
            return True
        return isinstance(node, cst.SimpleString) and " " in node.value.strip()

    def _drops_text(self, node: Any, changed: Any) -> bool:
        """Whether the change only drops an argument that is text, or one that the rules leave out."""
        if not isinstance(node, self._cst.Call) or not isinstance(changed, self._cst.Call):
            return False
        kept = {id(argument) for argument in changed.args}
        return any(
            id(argument) not in kept and (self._is_text(argument.value) or self._rule(argument) is not None)
            for argument in node.args
        )

    def _source(self, node: Any, changed: Any) -> str:
        source: str = self._module.deep_replace(node, changed).code
        return source

    def _text(self, node: Any) -> str:
        text: str = self._module.code_for_node(node)
        return text.strip()
