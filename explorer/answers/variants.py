"""The part of an answer about its variants, which are separate models side by side."""

from __future__ import annotations

from collections.abc import Sequence

from bexp.explorer.model.amounts import bytes_text
from bexp.explorer.records.recommendation import VariantAnswer


def variant_lines(variants: Sequence[VariantAnswer]) -> list[str]:
    """Return the lines of a table, with the candidate of each row, or why there is none, in a line below it.

    Variants with a capacity factor show their memory and what they drop, in place of their parameters.
    """
    drops = any(variant.capacity_factor is not None for variant in variants)
    compared = "num_query_groups and capacity_factor" if drops else "num_query_groups"
    head = ("groups", "capacity" if drops else "parameters", "micro_batch_size", "tokens/s", "confidence")
    rows = [(*head, *["peak", "dropped"] * drops), *(_cells(variant, drops=drops) for variant in variants)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"Variants by {compared} (separate models, not ranked)"]
    for cells, text in zip(rows, ["", *map(_below, variants)], strict=True):
        lines.append("  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
        lines += [f"      {text}"] if text else []
    return lines


def _cells(variant: VariantAnswer, *, drops: bool) -> tuple[str, ...]:
    best = variant.recommendation
    capacity = "none" if variant.capacity_factor is None else f"{variant.capacity_factor:g}"
    head = (str(variant.num_query_groups), capacity if drops else f"{variant.num_parameters:,}")
    if best is None:
        return (*head, *("-",) * (5 if drops else 3))
    speed = f"{best.expected_tokens_per_second:,.0f}"
    found = (str(best.candidate.micro_batch_size), speed, str(best.confidence))
    memory = (bytes_text(best.expected_peak_bytes), f"{best.dropped_share or 0.0:.1%}") if drops else ()
    return (*head, *found, *memory)


def _below(variant: VariantAnswer) -> str:
    best = variant.recommendation
    return variant.reason or "nothing fits" if best is None else best.candidate.describe()
