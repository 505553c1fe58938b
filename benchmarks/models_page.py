"""The survey's rows as a page to read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

_HEADINGS = {
    "parts": "Measured by parts",
    "whole": "Not measured by parts",
    "not": "Not measured",
}
_ABOUT = {
    "parts": "One layer of each kind, and the shell around the layers, compute what the whole model computes: outputs "
    "and every gradient are equal in float32, at micro-batches of 1 and 2.",
    "whole": "The model trains, but its parts do not add up to it, so an exploration ends with `unsupported`. Measure "
    "it whole with `examples/targets/hugging_face.py`: see [Targets](targets.md#any-other-model-of-transformers).",
    "not": "The model does not train at a tiny size on the CPU.",
}
_LONGEST_REASON = 70


def render(document: Mapping[str, Any]) -> str:
    """The page for a survey's JSON document, in Markdown."""
    rows: Mapping[str, Mapping[str, Any]] = document["models"]
    counts = Counter(row["status"] for row in rows.values())
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        "# Causal language models of transformers",
        "",
        f"Generated from `models.json` ({versions}) by `python -m benchmarks.model_survey`. Do not edit.",
        "",
        f"The library knows {len(rows)} types. {counts['parts']} are measured by parts, {counts['whole']} train but "
        f"have no such parts, {counts['not']} do not train at all. Each was built from its class's defaults at a "
        "tiny size. `models.json` has every reason in full.",
        "",
    ]
    for status, heading in _HEADINGS.items():
        chosen = {name: row for name, row in rows.items() if row["status"] == status}
        lines += [f"## {heading} ({len(chosen)})", "", _ABOUT[status], ""]
        lines += _names(chosen) if status == "parts" else _reasons(chosen)
    return "\n".join(lines + _missing(rows))


def _names(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The types by what they have for experts: `bexp.apply` sets expert back ends through the library's interface."""
    served = {name: "experts_interface" in row["features"] for name, row in rows.items()}
    kinds = {True: "With the library's experts interface", False: "Without experts that take this interface"}
    return [
        line
        for kind, title in kinds.items()
        for line in (f"{title}: {', '.join(name for name, support in served.items() if support is kind)}.", "")
    ]


def _reasons(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = [f"- {name}: {_escaped(_reason(row))}" for name, row in rows.items()]
    return [*lines, ""]


def _reason(row: Mapping[str, Any]) -> str:
    if "reason" in row:
        return str(row["reason"])
    failures: Mapping[str, str] = row["failures"]
    return next(reason for reason in failures.values() if not reason.startswith("needs "))


def _missing(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The features that types measured by parts lack."""
    lacking = defaultdict(list)
    for name, row in rows.items():
        for feature in row["failures"] if row["status"] == "parts" else ():
            if feature != "experts_interface" or row["has_experts"]:
                lacking[feature.replace("_", " ")].append(name)
    lines = [f"- {feature}: {', '.join(names)}" for feature, names in lacking.items()]
    return ["## Missing features", "", "All other types have them.", "", *lines, ""]


def _escaped(text: str) -> str:
    text = " ".join(text.split())
    text = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON].rsplit(' ', 1)[0]} ..."
    return text.replace("<", "&lt;")
