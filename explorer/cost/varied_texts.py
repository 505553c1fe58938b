"""The effects of texts of unequal lengths on the seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bexp.explorer.cost.composition import Composition, Floats
from bexp.explorer.cost.request_texts import text_batches


@dataclass(frozen=True, slots=True)
class VariedTexts:
    """Axes: B usual micro-batches, C candidates, K components.

    `drawn_BK` are the device seconds of usual micro-batches, as shares of their mean. `new_width_C` are the seconds
    that the first micro-batches of a width add to a micro-batch in the mean over an epoch.
    """

    drawn_BK: Floats  # noqa: N815 - axes are in names
    new_width_C: Floats  # noqa: N815 - axes are in names

    @classmethod
    def of(cls, table: Composition, drawn_BK: Floats, new_width_K: Floats) -> VariedTexts:
        """Return the effects, given the additional seconds of a component when a process first runs rows of a width.

        These occur once for all layers of a kind, however they are recomputed.
        """
        batches = {int(size): text_batches(table.request, int(size)) for size in np.unique(table.micro_batch_C)}
        share = {size: 0.0 if texts is None else texts.new_width_share for size, texts in batches.items()}
        found_C = np.zeros(len(table.candidates))
        for part in {component.part for component in table.components}:
            of_part_K = np.array([component.part == part for component in table.components])
            found_C += (table.uses_CK * np.where(of_part_K, new_width_K, 0.0)).max(axis=1)
        return cls(drawn_BK, found_C * np.array([share[int(size)] for size in table.micro_batch_C]))
