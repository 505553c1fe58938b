"""The variants of an answer, which are separate models, in a table side by side."""

from __future__ import annotations

from collections.abc import Sequence

from bexp.explorer.answers.rows import Table
from bexp.explorer.model.amounts import bytes_text
from bexp.explorer.records.recommendation import VariantAnswer


def variant_table(variants: Sequence[VariantAnswer]) -> Table:
    """Return a table; the note of a row is its candidate, or the reason why there is none.

    Variants with a capacity factor show their memory and dropped tokens, in place of their parameters.
    """
    drops = any(variant.capacity_factor is not None for variant in variants)
    compared = "num_query_groups and capacity_factor" if drops else "num_query_groups"
    head = ("groups", "capacity" if drops else "parameters", "micro_batch_size", "tokens/s", "confidence")
    return Table(
        title=f"Variants by {compared} (separate models, not ranked)",
        head=(*head, *["peak", "dropped"] * drops),
        rows=tuple(_cells(variant, drops=drops) for variant in variants),
        notes=tuple(map(_below, variants)),
    )


def _cells(variant: VariantAnswer, *, drops: bool) -> tuple[str, ...]:
    best = variant.recommendation
    capacity = "none" if variant.capacity_factor is None else f"{variant.capacity_factor:g}"
    head = (str(variant.num_query_groups), capacity if drops else f"{variant.num_parameters:,}")
    if best is None:
        return (*head, *("-",) * (5 if drops else 3))
    speed = f"{best.expected_tokens_per_second:,.0f}"
    figures = (str(best.candidate.micro_batch_size), speed, str(best.confidence))
    memory = (bytes_text(best.expected_peak_bytes), f"{best.dropped_share or 0.0:.1%}") if drops else ()
    return (*head, *figures, *memory)


def _below(variant: VariantAnswer) -> str:
    best = variant.recommendation
    return variant.reason or "nothing fits" if best is None else best.candidate.describe()
