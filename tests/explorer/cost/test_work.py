"""Amounts of work and memory: which field is which is what every sum of them relies on."""

from __future__ import annotations

import numpy as np

from bexp.explorer.cost.components import ComponentBytes, Work
from bexp.explorer.cost.composition import Composition, predict_component_table
from bexp.explorer.cost.part_costs import part_work, predict_part_bytes
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.measurement import ComponentMeasurement
from tests.explorer.cost.tiny import parts, request


def table() -> Composition:
    chosen = Candidate(micro_batch_size=3, attention_backend="sdpa", num_query_groups=1, loss="library")
    return Composition([chosen], parts(), request())


def test_bytes_are_saved_then_at_the_peak_of_forward_then_of_backward() -> None:
    found = table()
    shell = found.decompositions[0].head
    sizes = predict_part_bytes(shell, parts(), request())
    assert sizes == ComponentBytes(48 * 40, 48 * 50, 48 * 66)
    assert np.array_equal(predict_component_table(found)[:, found.column[shell]], [48 * 40, 48 * 50, 48 * 66])


def test_bytes_have_the_names_of_what_is_measured() -> None:
    measured = [name.removesuffix("_bytes") for name in ComponentMeasurement.model_fields]
    assert set(ComponentBytes.__dataclass_fields__) <= set(measured)


def test_work_is_operations_then_bytes() -> None:
    shell = table().decompositions[0].head
    assert part_work(shell, parts()) == Work(flops=48 * 100.0, bytes=100 + 2 * 48 * 40.0)
