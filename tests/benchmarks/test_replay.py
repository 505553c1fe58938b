from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.recorded_candidates import compose, composed_tokens_per_second
from benchmarks.replay.__main__ import main, summarize
from benchmarks.replay.ground_truth import FFN_RUN_STD, FFNS, RUN_STD, DrawnTruth, GroundTruth
from benchmarks.replay.runs import OURS, STRATEGIES, Line, Run, TrialBench, coordinate_descent, run_search, run_strategy
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.measurement import Outcome
from bexp.workers.replay.profiler import VirtualClock
from bexp.workers.replay.recording import WholeModelRow
from tests.simulated_tables import write
from tests.workers.replay.samples import recording, table_of


@pytest.fixture(scope="module")
def truth() -> GroundTruth:
    return GroundTruth.of("small", recording(memory_limit_gib=8))


def size(run: Run) -> int:
    assert run.candidate is not None
    return int(run.candidate.split()[0].removeprefix("micro_batch_size="))


def plain_sizes(truth: GroundTruth) -> list[int]:
    """The micro-batch sizes whose plain candidate fits."""
    return [
        c.micro_batch_size
        for c, tokens in zip(truth.table.candidates, truth.tokens_C, strict=True)
        if tokens > 0 and c.bta_tile is None and c.recompute == "none" and c.attention_backend == "cudnn"
    ]


def test_truth_is_composed_of_all_runs(truth: GroundTruth) -> None:
    figures = compose(truth.recording, truth.table)
    composed = composed_tokens_per_second(truth.table, figures)
    feasible = truth.tokens_C > 0
    assert 0 < feasible.sum() < len(feasible)
    assert truth.tokens_C[feasible] == pytest.approx(composed[feasible])
    best = truth.table.candidates[int(np.argmax(truth.tokens_C))]
    assert truth.regret(best) == 0
    assert truth.is_within_tolerance(best)
    assert truth.regret(None) == 1
    assert truth.regret(truth.table.candidates[int(np.argmin(feasible))]) == 1


def test_truth_is_the_whole_model_where_that_was_timed() -> None:
    recorded = recording(whole_model_share=0.5)
    found = GroundTruth.of("small", recorded)
    figures = compose(recorded, found.table)
    composed = composed_tokens_per_second(found.table, figures)
    ratios = {}
    for candidate, (row,) in recorded.whole_models.items():
        index = found.table.row[candidate]
        if row.figures is None:
            assert found.tokens_C[index] == 0
        else:
            ratios[index] = found.tokens_C[index] / composed[index]
    assert found.num_whole_models == len(ratios)
    assert len(set(ratios.values())) == len(ratios)
    others = [i for i in np.flatnonzero(found.tokens_C) if i not in ratios]
    scaled = found.tokens_C[others] / composed[others]
    assert scaled == pytest.approx(np.median(list(ratios.values())))


def test_a_candidate_whose_whole_model_failed_is_not_feasible() -> None:
    recorded = recording()
    best = GroundTruth.of("small", recorded)
    winner = best.table.candidates[int(np.argmax(best.tokens_C))]
    recorded.add(WholeModelRow(candidate=winner, run=0, outcome=Outcome.OUT_OF_MEMORY, reason="full"))
    assert GroundTruth.of("small", recorded).regret(winner) == 1
    recorded.whole_models[winner] = [WholeModelRow(candidate=winner, run=0, outcome=Outcome.UNSUPPORTED, reason="no")]
    assert GroundTruth.of("small", recorded).regret(winner) == 0


def test_equal_components_are_paid_once(truth: GroundTruth) -> None:
    bench = TrialBench(truth, seed=0)
    row = int(np.argmax(truth.tokens_C))
    first = bench.run(row)
    spent = bench.clock()
    assert spent > 0
    assert bench.run(row) == first
    assert bench.clock() == spent
    assert first == pytest.approx(truth.tokens_C[row], rel=0.02)


def test_a_candidate_over_the_limit_is_met_as_out_of_memory(truth: GroundTruth) -> None:
    bench = TrialBench(truth, seed=0)
    too_large = int(np.flatnonzero(truth.legal_C & (truth.tokens_C == 0))[0])
    assert bench.run(too_large) is None
    assert bench.num_out_of_memory == 1
    assert bench.fastest() is None


def test_what_people_do_instead_ends_where_their_tools_end(truth: GroundTruth) -> None:
    fitting = plain_sizes(truth)
    assert 1 < len(fitting) < 5
    for name in ("powers of two", "backing off from the top", "largest that fits"):
        run = run_strategy(truth, name, 0)
        assert size(run) == max(fitting), name
        assert run.num_out_of_memory >= 1
    best_of_few = run_strategy(truth, "deepspeed fast", 0)
    assert best_of_few.regret <= run_strategy(truth, "largest that fits", 0).regret + 0.01


class Told(TrialBench):
    """Is told the tokens/s of each candidate; those not above 0 do not fit."""

    def __init__(self, truth: GroundTruth, speed: Callable[[Candidate], float]) -> None:
        super().__init__(truth, seed=0)
        self.speed = speed
        self.tried: list[Candidate] = []

    def run(self, row: int) -> float | None:
        self.tried.append(self.truth.table.candidates[row])
        return max(0.0, self.speed(self.tried[-1])) or None


def test_a_coordinate_descent_ends_where_no_change_of_one_setting_is_faster(truth: GroundTruth) -> None:
    bench = TrialBench(truth, seed=0)
    chosen = coordinate_descent(bench, 0)
    assert chosen is not None
    speeds = {t.row: t.tokens_per_second for t in bench.tries}
    assert len(speeds) == len(bench.tries) < truth.legal_C.sum() / 2
    best = speeds[truth.table.row[chosen]]
    assert best is not None
    for name in set(Candidate.model_fields) - {"micro_batch_size"}:
        for row in map(int, np.flatnonzero(truth.legal_C)):
            other = truth.table.candidates[row]
            if other != chosen and other.model_copy(update={name: getattr(chosen, name)}) == chosen:
                assert (speeds[row] or 0.0) <= best, other.describe()
    assert run_strategy(truth, "coordinate descent", 0).seconds < truth.exhaustive_seconds


def test_a_coordinate_descent_walks_down_from_the_largest_that_fits_and_changes_every_setting(
    truth: GroundTruth,
) -> None:
    sizes = truth.request.space.micro_batch_sizes

    def speed(c: Candidate) -> float:
        if c.micro_batch_size > sizes[2]:
            return 0.0
        as_aimed = (c.recompute == "full") + (c.attention_backend == "flash")
        return 10.0 + as_aimed - abs(sizes.index(c.micro_batch_size) - 1)

    bench = Told(truth, speed)
    chosen = coordinate_descent(bench, 0)
    assert chosen is not None
    assert speed(chosen) == 12.0, chosen.describe()
    assert len(bench.tried) == len(set(bench.tried))
    assert truth.prune.bases[0] in bench.tried


def test_a_coordinate_descent_leaves_a_base_that_does_not_fit_but_has_lost_where_nothing_does(
    truth: GroundTruth,
) -> None:
    chosen = coordinate_descent(Told(truth, lambda c: float(c.recompute != "none")), 0)
    assert chosen is not None
    assert chosen.recompute != "none"
    assert coordinate_descent(Told(truth, lambda _: 0.0), 0) is None


def test_a_strategy_that_finds_nothing_that_fits_has_lost() -> None:
    recorded = recording()
    plain = [c for c in table_of(recorded).candidates if c.recompute == "none" and c.bta_tile is None]
    for candidate in plain:
        recorded.add(WholeModelRow(candidate=candidate, run=0, outcome=Outcome.OUT_OF_MEMORY, reason="full"))
    found = GroundTruth.of("small", recorded)
    assert run_strategy(found, "largest that fits", 0).regret == 1


def test_optunas_samplers_run_through_the_products_search(truth: GroundTruth) -> None:
    run = run_search(truth, 1, sampler="random")
    assert run.strategy == "random"
    assert run.confidence is not None
    assert run.regret < 0.5
    assert run_search(truth, 1, sampler="random") == run


def test_ours_is_replayed_with_every_line_against_the_truth(truth: GroundTruth) -> None:
    runs = [run_search(truth, seed) for seed in range(5)]
    assert max(run.regret for run in runs) < 0.03
    assert all(run.seconds < 0.5 * truth.exhaustive_seconds for run in runs)
    assert all(run.lines for run in runs)
    assert all(run.lines[-1].confidence == run.confidence for run in runs)
    assert all(run.lines[-1].within_tolerance == (run.regret <= truth.request.tolerance) for run in runs)
    assert all(run.num_unrecorded == 0 for run in runs)


def made(table: str, strategy: str, seconds: float, regret: float, *lines: Line) -> Run:
    return Run(table, strategy, 0, regret, 10, seconds, 0.0, 0, 0, 95, lines, "m=1")


def test_a_cheaper_strategy_that_is_as_good_is_named_and_tables_timed_whole_are_judged_apart() -> None:
    about = {"tolerance": 0.01, "exhaustive_seconds": 100.0, "num_feasible": 40}
    tables = {"composed": about | {"num_whole_models": 3}, "whole": about | {"num_whole_models": 40}}
    runs = [
        made("composed", OURS, 4.0, 0.001, Line(50, False, 2.0), Line(92, True, 5.0)),
        made("composed", "tpe", 3.0, 0.001),
        made("composed", "random", 1.0, 0.2),
        made("whole", OURS, 9.0, 0.0, Line(95, True, 7.0)),
    ]
    found = summarize(runs, tables)
    assert found["cheaper_with_equal_or_better_regret"] == ["composed: tpe"]
    assert found["tables"]["composed"][OURS]["share_of_exhaustive"]["median"] == 0.04
    assert found["strategies"]["random"]["share_within_tolerance"] == 0
    assert found["strategies"][OURS]["regret"]["max"] == 0.001
    assert found["calibration"]["num_lines"] == 3
    assert found["calibration_of_whole_models"]["num_lines"] == 1
    assert summarize(runs[3:], tables)["calibration_of_whole_models"] is None


def test_runs_on_any_tables_and_writes_one_file_whatever_the_processes(tmp_path: Path) -> None:
    for seed in (0, 1):
        write(recording(seed), tmp_path / f"table-{seed}.jsonl")
    paths = [str(tmp_path / f"table-{seed}.jsonl") for seed in (0, 1)]
    names = [OURS, *STRATEGIES]
    summaries = []
    for processes in ("1", "2"):
        out = tmp_path / f"{processes}.json"
        asked = [*paths, "--out", str(out), "--seeds", "1", "--processes", processes, "--strategies", *names]
        assert main(asked) == 0
        found = json.loads(out.read_text())
        assert found["tables"].keys() == {"table-0", "table-1"}
        summaries.append(found["summary"])
    assert summaries[0] == summaries[1]
    assert summaries[0]["strategies"].keys() == set(names)
    assert summaries[0]["calibration"]["num_tables"] == 2


def test_what_is_no_table_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.jsonl").write_text("{}\n")
    assert main([str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "o.json")]) == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_a_drawn_truth_differs_by_seed_and_its_runs_scatter_around_the_recorded_mean(truth: GroundTruth) -> None:
    first, second = (DrawnTruth.draw(truth, seed) for seed in (0, 1))
    feasible = truth.tokens_C > 0
    errors = np.log(first.tokens_C[feasible] / truth.tokens_C[feasible])
    assert 0.003 < errors.std() < 0.02
    assert second.tokens_C != pytest.approx(first.tokens_C)
    assert DrawnTruth.draw(truth, 0).tokens_C == pytest.approx(first.tokens_C)
    figures = compose(truth.recording, truth.table)
    devices = [first.device(seed, VirtualClock()) for seed in range(200)]
    for ffn, std in ((True, FFN_RUN_STD), (False, RUN_STD)):
        component = next(
            c for c in truth.table.components if (c.kind in FFNS) is ffn and c in truth.recording.components
        )
        rows = [device.draw(component) for device in devices]
        seconds = [row.figures.device_seconds for row in rows if row is not None and row.figures is not None]
        logs = np.log(seconds) - np.log(figures.device_seconds[truth.table.column[component]])
        assert logs.std() == pytest.approx(std, rel=0.2)
        assert abs(logs.mean()) < 0.3 * std


def test_a_whole_model_of_a_drawn_truth_shows_its_throughput(truth: GroundTruth) -> None:
    drawn = DrawnTruth.draw(truth, 0)
    run = run_search(drawn, 0)
    assert run.check_seconds > 0.0
    assert run.num_unrecorded == 0
    assert 0.0 <= run.regret < 0.05
    whole = recording(whole_model_share=1.0)
    timed = GroundTruth.of("small", whole)
    assert DrawnTruth.draw(timed, 0).tokens_C == pytest.approx(timed.tokens_C), "what was timed whole has its error"
