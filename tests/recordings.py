"""Compares what a test finds with what was recorded beside it.

BEXP_RECORD=1 pytest FILE    # writes the recordings anew; read the difference before it is committed
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
SIGNIFICANT = 7


def check_recorded(path: Path, found: Any, *, relative: float = 1e-4) -> None:
    """Assert that `found`, as JSON, is what the file holds; numbers, also those in texts, may differ by `relative`."""
    plain = json.loads(json.dumps(_rounded(found), default=str))
    if os.environ.get("BEXP_RECORD"):
        path.parent.mkdir(exist_ok=True)
        lines = [json.dumps(each, separators=(",", ":"), ensure_ascii=False) for each in plain]
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    different = list(differences(json.loads(path.read_text()), plain, relative))
    assert not different, "\n".join(different[:20])


def differences(recorded: Any, found: Any, relative: float, where: str = "") -> Iterator[str]:
    """Say where two JSON values differ."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*recorded, *found]):
            if key in recorded and key in found:
                yield from differences(recorded[key], found[key], relative, f"{where}.{key}")
            else:
                yield f"{where}.{key}: {'no longer there' if key in recorded else 'new'}"
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for index, (one, other) in enumerate(zip(recorded, found, strict=True)):
            yield from differences(one, other, relative, f"{where}[{index}]")
    elif not _alike(recorded, found, relative):
        yield f"{where}: {recorded!r} is now {found!r}"


def _alike(recorded: Any, found: Any, relative: float) -> bool:
    if isinstance(recorded, str) and isinstance(found, str):
        if NUMBER.split(recorded) != NUMBER.split(found):
            return False
        pairs = zip(NUMBER.findall(recorded), NUMBER.findall(found), strict=True)
        return all(one == other or _near_as_printed(one, other) for one, other in pairs)
    if type(recorded) is bool or type(found) is bool or recorded is None or found is None:
        return recorded is found
    if isinstance(recorded, int | float) and isinstance(found, int | float):
        return math.isclose(recorded, found, rel_tol=relative, abs_tol=1e-12)
    return bool(recorded == found)


def _near_as_printed(one: str, other: str) -> bool:
    """Whether two printed numbers differ by one in their last place, or by little."""
    first, second = (float(text.replace(",", "")) for text in (one, other))
    last = 10.0 ** -len(one.partition(".")[2])
    return abs(first - second) <= 1.01 * last * ("." in one) or math.isclose(first, second, rel_tol=1e-4)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
