from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.record import Recorder, main, open_table, take_over
from benchmarks.recording_file import covered_request
from benchmarks.replay.ground_truth import GroundTruth
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Composition
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import Conditions, Measurement, Outcome
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.process.interface import DeviceProfiler
from bexp.workers.replay.profiler import RecordedDevice
from bexp.workers.replay.recording import Recording, RecordingError
from tests.explorer.simulator import SimulatedDevice, report
from tests.forked_profilers import forked_profilers
from tests.workers.replay.samples import recording, request, table_of

SHARED = Conditions(foreign_processes=1)


class TableProfiler(DeviceProfiler):
    """Answers from a complete table; components of `too_large` and above run out of memory."""

    restarts = 0

    def __init__(self, recorded: Recording, *, too_large: int = 1000, device_name: str = "a") -> None:
        self.plans: list[TrialTask] = []
        self._recorded = recorded
        self._too_large = too_large
        self._device_name = device_name
        self._device = RecordedDevice(recorded, seed=0)

    def start(self) -> None: ...

    def hardware(self) -> HardwareSpec:
        found = self._recorded.header.report.hardware
        return found.model_copy(update={"device_name": self._device_name})

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        return self._recorded.header.report.model_copy(update={"hardware": self.hardware()})

    def measure(self, task: TrialTask) -> Measurement:
        self.plans.append(task)
        large = [c for c in task.components if c.micro_batch_size >= self._too_large]
        if large:
            self.restarts += 1
            return Measurement(
                candidate=task.candidate, outcome=Outcome.OUT_OF_MEMORY, reason="full", failed_component=large[0]
            )
        return self._device(task)

    def finish_job(self) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


def record(
    path: Path,
    profiler: TableProfiler,
    asked: ExplorationRequest,
    *,
    runs: int = 1,
    whole: str = "none",
    whole_models: int = 4,
    seconds: float = 60.0,
    reuse: tuple[Path, ...] = (),
) -> tuple[bool, Recording]:
    file = open_table(path, "small", asked, profiler, 1.0)
    try:
        take_over(file, reuse)
        recorder = Recorder(file, profiler, deadline_seconds=10, budget_seconds=seconds)
        done = recorder.record(space(file.recording), runs=runs, whole=whole, whole_models=whole_models)
    finally:
        file.close()
    return done, Recording.read(path)


def space(recorded: Recording) -> Composition:
    return table_of(recorded)


def measured(profiler: TableProfiler) -> list[Component]:
    return [c for plan in profiler.plans for c in plan.components]


def test_every_component_of_every_candidate_is_recorded_as_often_as_asked(tmp_path: Path) -> None:
    profiler = TableProfiler(recording())
    done, recorded = record(tmp_path / "t.jsonl", profiler, request(), runs=3)
    assert done
    table = space(recorded)
    assert {c: len(rows) for c, rows in recorded.components.items()} == dict.fromkeys(table.components, 3)
    assert [row.run for row in recorded.components[table.components[0]]] == [0, 1, 2]
    assert covered_request(recorded) == request()
    sizes = [c.micro_batch_size for c in measured(profiler)[: len(table.components)]]
    assert sizes == sorted(sizes)


def test_a_second_start_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    whole = recording()
    record(path, TableProfiler(whole), request(), runs=2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:20]) + lines[20][:30])
    rest = TableProfiler(whole)
    done, recorded = record(path, rest, request(), runs=2)
    assert done
    assert len(rest.plans) == len(lines) - 20
    assert all(len(rows) == 2 for rows in recorded.components.values())
    again = TableProfiler(whole)
    assert record(path, again, request(), runs=2)[0]
    assert again.plans == []


def test_a_spent_budget_leaves_a_table_of_the_small_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Slow(TableProfiler):
        def measure(self, task: TrialTask) -> Measurement:
            nonlocal now
            now += 0.01
            return super().measure(task)

    monkeypatch.setattr("benchmarks.record.time", SimpleNamespace(monotonic=lambda: now))

    done, recorded = record(tmp_path / "t.jsonl", Slow(recording()), request(), seconds=0.4)
    assert not done
    sizes = covered_request(recorded).space.micro_batch_sizes
    assert 0 < len(sizes) < 5
    assert sizes == request().space.micro_batch_sizes[: len(sizes)]


def test_what_is_larger_than_what_ran_out_of_memory_is_inferred(tmp_path: Path) -> None:
    profiler = TableProfiler(recording(), too_large=8)
    _, recorded = record(tmp_path / "t.jsonl", profiler, request(), runs=2)
    failed = {c: rows for c, rows in recorded.components.items() if rows[0].outcome is Outcome.OUT_OF_MEMORY}
    assert {c.micro_batch_size for c in failed} == {8, 16}
    heads = {c.micro_batch_size: rows for c, rows in failed.items() if c.kind is ComponentKind.HEAD}
    assert not heads[8][0].inferred
    assert heads[8][0].replaced
    assert heads[16][0].inferred
    assert heads[16][0].reason == "as head(m=8): full"
    assert all(len(rows) == 1 for rows in failed.values())  # what failed is not repeated


def test_a_share_of_the_candidates_is_timed_whole_and_half_of_them_near_the_best(tmp_path: Path) -> None:
    whole = recording(whole_model_share=1.0)
    profiler = TableProfiler(whole)
    done, recorded = record(tmp_path / "t.jsonl", profiler, request(), whole="share", whole_models=6)
    assert done
    assert len(recorded.whole_models) == 6
    assert [p.kind for p in profiler.plans].count(TrialKind.WHOLE_MODEL) == 6
    again = TableProfiler(whole)
    record(tmp_path / "t.jsonl", again, request(), whole="share", whole_models=6)
    assert again.plans == []


def test_all_candidates_that_fit_are_timed_whole(tmp_path: Path) -> None:
    whole = recording(whole_model_share=1.0)
    done, recorded = record(tmp_path / "t.jsonl", TableProfiler(whole), request(), whole="all")
    assert done
    assert recorded.whole_models.keys() == whole.whole_models.keys()


def test_a_table_of_something_else_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(path, TableProfiler(recording()), request())
    with pytest.raises(RecordingError, match="another request"):
        record(path, TableProfiler(recording()), request(batch_size=32))
    with pytest.raises(RecordingError, match="was begun on"):
        record(path, TableProfiler(recording(), device_name="b"), request())


def test_runs_of_a_table_with_another_limit_are_taken_over(tmp_path: Path) -> None:
    record(tmp_path / "wide.jsonl", TableProfiler(recording()), request(), runs=2)
    profiler = TableProfiler(recording())
    tight = request(memory_limit_gib=16, micro_batch_size=[2, 4])
    done, recorded = record(tmp_path / "tight.jsonl", profiler, tight, runs=2, reuse=(tmp_path / "wide.jsonl",))
    assert done
    # Only what the narrower space has and the wider one had not: the fallbacks of its own base.
    assert {c.micro_batch_size for c in measured(profiler)} <= {2}
    taken = recorded.components.keys() - set(measured(profiler))
    assert len(taken) == 19, "all of the narrower space but the fallbacks of its own base"
    assert all(len(recorded.components[c]) == 2 for c in taken)
    other = request(routing={"kind": "uniform"}, execution="compile")
    with pytest.raises(RecordingError, match="execution"):
        record(tmp_path / "c.jsonl", profiler, other, reuse=(tmp_path / "wide.jsonl",))


class DisturbedProfiler(TableProfiler):
    """Disturbed by another process in the trials of `disturbed`."""

    def __init__(self, recorded: Recording, disturbed: range) -> None:
        super().__init__(recorded)
        self._disturbed = disturbed

    def measure(self, task: TrialTask) -> Measurement:
        measurement = super().measure(task)
        if len(self.plans) - 1 not in self._disturbed:
            return measurement
        found = tuple(m.model_copy(update={"conditions": SHARED}) for m in measurement.components)
        whole = measurement.whole_model
        update = {"components": found, "whole_model": whole and whole.model_copy(update={"conditions": SHARED})}
        return measurement.model_copy(update=update)


def test_a_contaminated_run_is_recorded_and_made_again(tmp_path: Path) -> None:
    complete = recording(whole_model_share=1.0)
    calm, disturbed = tmp_path / "calm.jsonl", tmp_path / "disturbed.jsonl"
    record(calm, TableProfiler(complete), request(), runs=2, whole="share", whole_models=2)
    number = len(table_of(complete).components)
    for hit in (range(1), range(2, 4), range(number, number + 1)):
        done, recorded = record(
            disturbed, DisturbedProfiler(complete, hit), request(), runs=2, whole="share", whole_models=2
        )
        assert done
        assert len(recorded.contaminated) == len(hit)
        assert all("shared with another process" in str(row.reason) for row in recorded.contaminated)
        found, wanted = GroundTruth.of("t", recorded), GroundTruth.read(calm)
        assert (found.tokens_C == wanted.tokens_C).all()
        assert found.exhaustive_seconds == wanted.exhaustive_seconds
        disturbed.unlink()


def test_what_stays_contaminated_is_left_for_the_next_start(tmp_path: Path) -> None:
    path, complete = tmp_path / "t.jsonl", recording()
    first = DisturbedProfiler(complete, range(5, 8))
    done, recorded = record(path, first, request())
    assert not done
    assert len(recorded.contaminated) == 3
    (lost,) = first.plans[5].components
    assert lost not in recorded.components
    assert lost.micro_batch_size not in covered_request(recorded).space.micro_batch_sizes
    second = TableProfiler(complete)
    done, recorded = record(path, second, request())
    assert done
    assert [plan.components for plan in second.plans] == [(lost,)]
    assert covered_request(recorded) == request()


CONFIG = """
model: {name: tiny, num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 2, vocab_size: 64,
        seq_length: 16, dtype: float32}
batch_size: 4
micro_batch_size: [1]
recompute: [none]
bta: {enable: false}
attention_backends: [flash]
"""


@pytest.mark.slow(together="forked")
def test_records_on_a_real_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "tiny.yaml", tmp_path / "tiny.jsonl"
    config.write_text(CONFIG)
    arguments = [str(config), "--out", str(out), "--device", "cpu", "--whole", "all", "--runs", "2"]
    arguments += ["--whole-runs", "2"]
    with forked_profilers():
        assert main(arguments) == 0
    assert "tiny.jsonl: complete" in capsys.readouterr().out
    recorded = Recording.read(out)
    table = space(recorded)
    assert {c: len(rows) for c, rows in recorded.components.items()} == dict.fromkeys(table.components, 2)
    assert set(recorded.whole_models) == set(table.candidates)
    assert all([row.run for row in rows] == [0, 1] for rows in recorded.whole_models.values())
    assert recorded.header.process_start_seconds > 0


class SimulatedProfiler:
    """A device whose trials take no time."""

    restarts = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def start(self) -> None: ...

    def hardware(self) -> HardwareSpec:
        return report(experts=False).hardware

    def begin(self, request: ExplorationRequest) -> DeviceReport:
        self.measure = SimulatedDevice(request)
        return report(experts=False)

    def close(self) -> None: ...


def test_records_several_tables_in_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.record.Profiler", SimulatedProfiler)
    first, second, taken = (tmp_path / f"{name}.yaml" for name in ("first", "second", "taken"))
    first.write_text(CONFIG)
    second.write_text(CONFIG.replace("seq_length: 16", "seq_length: 32"))
    taken.write_text(CONFIG)
    configs = [str(path) for path in (first, taken, second)]
    out = tmp_path / "tables"
    out.mkdir()
    (out / "taken.jsonl").write_text("{}\n")
    assert main([*configs, "--out", str(out), "--device", "cpu", "--whole", "none", "--runs", "1"]) == 1
    said = capsys.readouterr()
    assert said.out.count(": complete") == 2
    assert "taken.jsonl" in said.err
    lengths = [Recording.read(out / f"{name}.jsonl").header.request.shapes.seq_length for name in ("first", "second")]
    assert lengths == [16, 32]
