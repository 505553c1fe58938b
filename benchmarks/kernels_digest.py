"""A hash of the kernels' code: what was measured with one hash is what kernels of another may not reach.

It is of the statements that run, wherever they stand. Imports, comments, docstrings and the functions that tell a
compiler the shapes of an operator's results change no speed; nor does the file that a statement is in. A change of
these leaves the hash as it is, and recorded results are still of these kernels.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

OTHER_KERNELS = ("attention", "causal_loss", "loss", "recomputation", "tiling")
"""Modules beside the experts that these do not import: a change of theirs leaves the experts' speed as it was."""

_EXPERTS = Path(__file__).parents[1] / "bexp" / "kernels" / "experts"
_LEFT_OUT = {*(_EXPERTS.parent / f"{name}.py" for name in OTHER_KERNELS), _EXPERTS / "registry.py"}
"""The registry names the kernels and runs none."""


@functools.cache
def kernels_digest() -> str:
    """Return the hash of our expert kernels and of what launches them."""
    written: list[str] = []
    for path in (*_EXPERTS.parent.glob("*.py"), *_EXPERTS.rglob("*.py")):
        if path not in _LEFT_OUT:
            written += statements(path.read_text())
    return hashlib.sha256("\n".join(sorted(written)).encode()).hexdigest()[:16]


def statements(source: str) -> list[str]:
    """Return the statements of a Python source in one form, the same in all versions of Python that parse it alike."""
    return ["\n".join(_written(node)) for node in ast.parse(source).body if not _is_silent(node)]


def _written(node: object) -> Iterator[str]:
    """Yield a syntax tree in one form: what a version of Python does not know is empty in the others, and left out."""
    if isinstance(node, ast.JoinedStr):  # Python 3.12 ends some with an empty text
        node.values = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
    if isinstance(node, list):
        for item in node:
            if not _is_silent(item):
                yield from _written(item)
    elif isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if isinstance(node, ast.Constant) or (value is not None and value != []):
                yield name
                yield from _written(value)
        yield ")"
    else:
        yield repr(node)


def _is_silent(node: object) -> bool:
    """Whether a statement takes no time in a run: an import, a text, or an operator's shapes for a compiler."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(isinstance(one, ast.Attribute) and one.attr == "register_fake" for one in decorators)
