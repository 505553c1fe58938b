"""What tells the variants of a request apart: settings that change the model, so that no search ranks them."""

from __future__ import annotations

from typing import NamedTuple


class Variant(NamedTuple):
    """One of the models that a request compares.

    `capacity_factor` is null for a model without experts, and for one whose experts drop no tokens.
    """

    num_query_groups: int
    capacity_factor: float | None = None

    def describe(self) -> str:
        """Return `num_query_groups=2,capacity_factor=1.25`; a model that drops no tokens names its groups alone."""
        groups = f"num_query_groups={self.num_query_groups}"
        return groups if self.capacity_factor is None else f"{groups},capacity_factor={self.capacity_factor:.15g}"
