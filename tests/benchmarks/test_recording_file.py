from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recording_file import RecordingFile, component_row, covered_request, encode_row
from bexp.explorer.records.measurement import (
    BatchFigures,
    ComponentFigures,
    ComponentMeasurement,
    Conditions,
    Measurement,
    Outcome,
    judge,
)
from bexp.workers.replay.recording import ROWS, ComponentRow, Recording, RecordingError
from tests.simulated_tables import write
from tests.workers.replay.samples import empty, recording, row, table_of


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    recorded = recording(whole_model_share=0.3)
    write(recorded, tmp_path / "table.jsonl")
    read = Recording.read(tmp_path / "table.jsonl")
    assert read.header == recorded.header
    assert read.components.keys() == recorded.components.keys()
    assert read.whole_models.keys() == recorded.whole_models.keys()
    for component, rows in recorded.components.items():
        for before, after in zip(rows, read.components[component], strict=True):
            assert before.figures is not None and after.figures is not None
            assert after.figures.device_seconds == pytest.approx(before.figures.device_seconds, rel=1e-5)
            assert after.figures.saved_bytes == before.figures.saved_bytes


def test_every_figure_of_a_component_is_recorded() -> None:
    recorded = empty()
    table = table_of(recorded)
    times: dict[str, Any] = {name: 0.5 for name in ComponentFigures.model_fields if name.endswith("seconds")}
    sizes = {name: 7 for name in ComponentFigures.model_fields if name.endswith("bytes")}
    times |= {"compile_seconds": (0.5,), "span_seconds": (0.4, 0.5)}  # of each new shape; of the extreme spans
    batch = {name: 0.5 if name.endswith("seconds") else 7 for name in BatchFigures.model_fields}
    figures = {**times, **sizes, "batches": (BatchFigures.model_validate(batch),)}
    counts = {"repeats": 3, "slowdown": 0.25, "grad_accum_steps": 4, "num_shapes": 2, "busy_share": 0.5}
    counts["new_width_share"] = 0.5
    found = ComponentMeasurement(component=table.components[0], **counts, **figures)
    assert found.model_fields_set >= ComponentFigures.model_fields.keys(), "no figure is left out of this test"
    trial = Measurement(candidate=table.candidates[0], outcome=Outcome.OK, components=(found,))
    read = ROWS.validate_json(encode_row(component_row(found.component, 0, trial, replaced=False)))
    assert isinstance(read, ComponentRow)
    assert read.measurement() == found


def test_what_a_killed_recorder_left_of_a_line_is_ignored_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    recorded = empty()
    first, second = table_of(recorded).components[:2]
    file = RecordingFile(path, recorded.header)
    file.append(row(first))
    file.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"type":"component","comp')
    assert list(Recording.read(path).components) == [first]
    again = RecordingFile(path, recorded.header)
    again.append(row(second))
    again.close()
    assert path.read_bytes().startswith(whole)
    assert list(Recording.read(path).components) == [first, second]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "its first line is no header"),
        (lambda lines: lines[1:], "its first line is no header"),
        (lambda lines: [lines[0], lines[0]], "line 2: a second header"),
        (lambda lines: [lines[0], '{"type": "component"}'], "line 2: component.component: is missing"),
        (lambda lines: [lines[0], "nonsense"], "line 2: Invalid JSON"),
        (lambda lines: [json.dumps(json.loads(lines[0]) | {"version": 2})], "line 1: header.version"),
    ],
)
def test_what_is_no_table_is_refused_by_line(tmp_path: Path, change: object, message: str) -> None:
    assert callable(change)
    recorded = empty()
    lines = [encode_row(recorded.header).strip(), encode_row(row(table_of(recorded).components[0])).strip()]
    path = tmp_path / "table.jsonl"
    path.write_text("".join(line + "\n" for line in change(lines)))
    with pytest.raises(RecordingError, match=message):
        Recording.read(path)


def test_sizes_that_are_not_recorded_in_full_are_left_out() -> None:
    recorded = recording()
    gone = next(c for c in recorded.components if c.micro_batch_size == 8)
    del recorded.components[gone]
    covered = covered_request(recorded)
    assert covered.space.micro_batch_sizes == (1, 2, 4, 16)
    assert recorded.missing_sizes(covered, covered.shapes) == ()


def test_nothing_is_covered_without_the_optimizer() -> None:
    recorded = recording()
    del recorded.components[next(c for c in recorded.components if c.micro_batch_size == 0)]
    with pytest.raises(RecordingError, match="no micro-batch size"):
        covered_request(recorded)


HOT = Conditions(
    sm_clock_mhz=1200,
    sm_clock_min_mhz=1100,
    sm_clock_max_mhz=1980,
    memory_clock_mhz=3201,
    power_watts=512.345,
    temperature_celsius=90,
    clock_reasons=("hw_thermal_slowdown",),
    host_busy_share=0.123456,
)
CALM = HOT.model_copy(update={"clock_reasons": ("sw_power_cap",)})


def measured(recorded: Recording, conditions: Conditions) -> Measurement:
    table = table_of(recorded)
    found = row(table.components[0]).measurement().model_copy(update={"conditions": conditions})
    return judge(Measurement(candidate=table.candidates[0], outcome=Outcome.OK, components=(found,)))


def test_a_row_keeps_the_conditions_in_short() -> None:
    recorded = empty()
    component = table_of(recorded).components[0]
    line = encode_row(component_row(component, 0, measured(recorded, CALM), replaced=False))
    assert json.loads(line)["conditions"] == {
        "sm_clock_mhz": 1200,
        "sm_clock_min_mhz": 1100,
        "power_watts": 512,
        "temperature_celsius": 90,
        "clock_reasons": ["sw_power_cap"],
        "host_busy_share": 0.12,
    }
    read = ROWS.validate_json(line)
    assert isinstance(read, ComponentRow)
    assert read.measurement().contamination is None
    plain = encode_row(component_row(component, 0, measured(recorded, Conditions()), replaced=False))
    assert "conditions" not in json.loads(plain)


def test_contaminated_rows_are_kept_and_stand_for_nothing(tmp_path: Path) -> None:
    recorded = empty()
    component = table_of(recorded).components[0]
    contaminated = component_row(component, 0, measured(recorded, HOT), replaced=False)
    assert contaminated.outcome is Outcome.CONTAMINATED
    assert contaminated.reason == "the device is throttled: hw_thermal_slowdown"
    assert contaminated.figures is None
    file = RecordingFile(tmp_path / "table.jsonl", recorded.header)
    file.append(contaminated)
    file.append(row(component, 0))
    file.close()
    read = Recording.read(tmp_path / "table.jsonl")
    assert read.contaminated == [contaminated]
    assert [kept.outcome for kept in read.components[component]] == [Outcome.OK]
    assert read.components.keys() == {component}
    assert read.whole_models == {}
