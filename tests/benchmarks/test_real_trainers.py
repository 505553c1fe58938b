"""What the table of real trainers runs, and what it makes of the runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import real_trainers
from benchmarks.real_trainers import ModelRun, describe, main
from benchmarks.result_rows import other_experts, trainers
from benchmarks.trainer_contenders import (
    OTHER_EXPERTS,
    Run,
    answered,
    divisors,
    document_of,
    gain,
    next_size,
    variants_of,
)
from benchmarks.trainer_runs import OUT_OF_MEMORY, batch_seconds, micro_steps_of

EXPLORED = ["execution=explore", "losses=[library,chunked]"]
OURS = {"micro_batch_size": 16, "bta_tile": None, "expert_backend": "bexp_fused", "loss": "chunked"}
OURS |= {"execution": "compile"}
STOCK = {**OURS, "expert_backend": "grouped_mm"}
IN_TURN = ["unchanged", "compiled", "stock", "library_loss", "experts", "recommended"]
NUM_SIZING = 4 + 1 + 2 + 2 + 2 + 2 * len(OTHER_EXPERTS)
"""Of the unchanged Trainer, Liger, `compiled`, `stock`, `library_loss`, `experts`."""
TINY = {"model_type": "gpt2", "n_positions": 16}


def run(size: int, speed: float | None, **more: Any) -> Run:
    reached: Run = {"error": OUT_OF_MEMORY} if speed is None else {"tokens_per_second": speed}
    return {"micro_batch_size": size, **reached, **more}


def answer_with(candidate: Run, **others: Run) -> Run:
    """An answer with alternatives by their roles."""
    alternatives = [{"role": role, "candidate": of} for role, of in others.items()]
    return {"candidate": candidate, "alternatives": alternatives}


def row_of(recommendation: Run | None, **more: Any) -> Run:
    answer = {"recommendation": recommendation, "job": {"created_at": "2026-11-30T"}}
    document = None if recommendation is None else answer
    row: Run = {"model": "m", "fields": EXPLORED, "batch_size": 64, "seq_length": 16, "lengths": None}
    row |= {"exploration": {"wall_seconds": 61.2, "log": [], "document": document}, "sizes": {}, "rounds": []}
    return row | more


def sized(speed: Mapping[int, float], start: int, **more: Any) -> list[int]:
    """The sizes that are tried where each of these has this speed, and others have no memory."""
    made: list[Run] = []
    while (size := next_size(divisors(64), made, start)) is not None:
        made.append(run(size, speed.get(size), **more))
    return [one["micro_batch_size"] for one in made]


def test_a_size_is_left_for_a_larger_one_that_is_faster_and_then_for_a_smaller_one() -> None:
    speed = {2: 9.0, 4: 10.0, 8: 12.0, 16: 11.0}
    assert sized(speed, 4) == [4, 8, 16]
    assert sized(speed, 16) == [16, 32, 8, 4]
    assert sized({4: 10.0, 8: 9.0, 2: 11.0, 1: 1.0}, 4) == [4, 8, 2, 1]


@pytest.mark.parametrize("compiled", [{"torch_compile": True}, {"candidate": {"execution": "compile"}}])
def test_what_compiles_is_not_tried_below_the_largest_that_fits(compiled: Run) -> None:
    assert sized({2: 12.0, 4: 10.0}, 8, **compiled) == [8, 4]
    assert sized({4: 10.0, 8: 12.0}, 4, **compiled) == [4, 8, 16]


def test_contenders_differ_from_the_recommended_one_by_one_thing_each() -> None:
    row = row_of(answer_with(OURS, stock={**STOCK, "micro_batch_size": 8}))
    variants = variants_of(row)
    assert variants["stock"] == [{"candidate": STOCK}]
    other = {**STOCK, "loss": "library", "execution": "compile"}
    answer = answer_with(OURS, stock={**other, "micro_batch_size": 8})
    assert variants_of(row_of(answer))["stock"] == [{"candidate": STOCK}, {"candidate": other}], "both at 16 at first"
    assert variants["library_loss"] == [{"candidate": {**STOCK, "loss": "library"}}]
    assert variants["compiled"] == [{"torch_compile": True}]
    assert variants["liger"][1] == {"use_liger_kernel": True, "torch_compile": True}
    assert variants["experts grouped_mm"] == [{"candidate": STOCK}]
    assert variants["experts bexp_liger"] == [{"candidate": {**OURS, "expert_backend": "bexp_liger"}}]
    dense = {**OURS, "expert_backend": None, "loss": "library"}
    assert set(variants_of(row_of({"candidate": dense}, fields=["execution=eager"]))) == {"unchanged", "liger"}
    assert set(variants_of(row_of(None))) == {"unchanged", "liger", "compiled"}


def test_the_answer_is_that_which_divides_the_batch() -> None:
    divided = {**OURS, "micro_batch_size": 8}
    row = row_of(answer_with({**OURS, "micro_batch_size": 12}, dividing=divided))
    assert answered(row) == {"micro_batch_size": 8, "candidate": divided}
    assert document_of(row, divided) is row["exploration"]["document"]
    assert document_of(row, STOCK)["recommendation"]["alternatives"] == []
    assert answered(row_of(answer_with({**OURS, "micro_batch_size": 12}))) is None
    assert answered(row_of(None)) is None


def test_gains_are_medians_of_the_rounds() -> None:
    rounds = [{"unchanged": run(4, 10.0), "recommended": run(8, speed)} for speed in (11.0, 15.0, 12.0)]
    assert gain(rounds, "unchanged") == 1.2
    assert gain(rounds, "liger") is None
    assert gain([{"unchanged": run(4, None), "recommended": run(8, 1.0)}], "unchanged") is None
    row = row_of({"candidate": OURS}, rounds=rounds, fields=[])
    assert describe(row) == "m: 1.200x unchanged, answered after 61 s"
    assert "failed" in describe({**row, "rounds": []})


class Trainer:
    """Stands in for the Trainer. Larger sizes are faster up to 8, and more does not fit."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.cut_off_at = -1

    def run(self, asked: Run, _: float) -> Run:
        if self.num_runs == self.cut_off_at:
            raise RuntimeError("cut off")
        self.num_runs += 1
        size = asked["micro_batch_size"]
        if asked.get("use_liger_kernel"):
            return {**asked, "error": "LookupError", "message": "liger-kernel does not know gpt2"}
        return {**asked, **run(size, float(size) if size <= 8 else None)}


class Process:
    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_contenders_run_in_turns_at_their_best_sizes_and_a_second_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out, trainer = tmp_path / "tiny.json", tmp_path / "out.json", Trainer()
    config.write_text(json.dumps(TINY))
    exploration = row_of(answer_with(OURS, dividing={**OURS, "micro_batch_size": 8}))["exploration"]
    monkeypatch.setattr(real_trainers, "subprocess", SimpleNamespace(Popen=Process, PIPE=None))
    monkeypatch.setattr(ModelRun, "_explore", lambda _: exploration)
    monkeypatch.setattr(ModelRun, "_train", trainer.run)
    command = [str(config), "--gpus", "", "--out", str(out), *(word for field in EXPLORED for word in ("--set", field))]
    trainer.cut_off_at = NUM_SIZING + len(IN_TURN) + 1  # in the second round
    main(command)
    (row,) = json.loads(out.read_text())["models"]
    assert (sum(len(runs) for runs in row["sizes"].values()), len(row["rounds"])) == (NUM_SIZING, 1)
    trainer.cut_off_at = -1
    main(command)
    main(command)
    (row,) = json.loads(out.read_text())["models"]
    assert [list(made) for made in row["rounds"]] == [IN_TURN] * 3
    assert [made["micro_batch_size"] for made in row["rounds"][2].values()] == [8] * len(IN_TURN)
    for made in [*row["sizes"]["stock"], *row["sizes"]["library_loss"], row["rounds"][0]["recommended"]]:
        assert made["candidate"]["micro_batch_size"] == made["micro_batch_size"]
    assert trainer.num_runs == NUM_SIZING + 3 * len(IN_TURN) + 1


def test_the_fastest_of_the_other_experts_runs_in_turns_and_each_has_its_best_or_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed, asked_for = {"grouped_mm": 10.0, "eager": 1.0, "bexp_liger": 12.0}, []

    def train(_: ModelRun, asked: Run, __: float) -> Run:
        name, size = asked["candidate"]["expert_backend"], asked["micro_batch_size"]
        asked_for.append((name, size))
        if name == "batched_mm":
            return {**asked, **(run(size, 3.0) if size <= 4 else {"error": OUT_OF_MEMORY})}
        if name in speed or name == "bexp_fused":
            return {**asked, **run(size, speed.get(name, 15.0) * (1 + (size == 16))), "device_name": "a card"}
        if name == "deepgemm":
            return {**asked, "error": "ended after 300 s"}
        return {**asked, "error": "ImportError", "message": f"{name} is not installed\nand more"}

    config, out = tmp_path / "tiny.json", tmp_path / "out.json"
    config.write_text(json.dumps(TINY))
    monkeypatch.setattr(real_trainers, "subprocess", SimpleNamespace(Popen=Process, PIPE=None))
    monkeypatch.setattr(ModelRun, "_explore", lambda _: row_of({"candidate": OURS})["exploration"])
    monkeypatch.setattr(ModelRun, "_train", train)
    others = ["unchanged", "compiled", "liger", "stock", "library_loss"]
    main([str(config), "--gpus", "", "--out", str(out), "--without", *others])
    written = json.loads(out.read_text())
    (row,) = trainers(written)
    assert row["experts"] == {"text": "m=16, bexp_liger, compile: 0.0k tokens/s (spread 0.0%)"}
    assert (row["over"]["experts"], row["card"]) == (15 / 12, "a card")
    assert [size for name, size in asked_for if name == "eager"] == [16], "far behind at its first size"
    assert [size for name, size in asked_for if name == "grouped_mm"] == [16, 32]
    found = {row["experts"]: row for row in other_experts(written)}
    assert {name: row["best"]["tokens_per_second"] for name, row in found.items() if "best" in row} == {
        name: 2 * each for name, each in speed.items()
    } | {"batched_mm": 3.0}
    assert [size for name, size in asked_for if name == "batched_mm"] == [16, 8, 4], "down to what fits"
    assert found["sonicmoe"]["failed"] == "ImportError sonicmoe is not installed"
    assert found["deepgemm"]["failed"] == "ended after 300 s"


def test_a_row_in_turns_shows_medians_spreads_and_reasons_and_one_of_one_run_shows_that() -> None:
    rounds = [
        {
            "unchanged": run(4, speed, peak_reserved_bytes=2**30),
            "compiled": run(8, None),
            "recommended": run(8, 2 * speed, candidate=OURS),
        }
        for speed in (1000.0, 1100.0, 1050.0)
    ]
    liger = [{"error": "LookupError", "message": "liger-kernel does not know m"}]
    new = row_of({"candidate": OURS}, rounds=rounds, sizes={"liger": liger})
    old = row_of({"candidate": OURS}, sweep=[run(3, 1000.0)], recommended=[run(6, 1500.0)])
    for part in ("sizes", "rounds", "batch_size"):
        del old[part]
    (shown,) = trainers({"models": [new]})
    assert shown["unchanged"] == {"text": "m=4: 1.1k tokens/s (spread 9.5%), 1.0 GiB"}
    assert shown["recommended"] == {"text": "m=8, compile: 2.1k tokens/s (spread 9.5%)"}
    assert (shown["compiled"], shown["liger"]) == ({"text": OUT_OF_MEMORY}, {"text": liger[0]["message"]})
    assert (shown["over"]["unchanged"], shown["turns"], shown["explored"]) == (2.0, 3, "2026-11-30")
    (shown,) = trainers({"models": [old, {**new, "rounds": []}]})
    assert (shown["unchanged"], shown["turns"]) == ({"text": "m=3: 1.0k tokens/s"}, 1)
    assert (shown["over"]["unchanged"], shown["batch"]) == (1.5, "one micro-batch")


def test_a_step_of_the_batch_counts_its_update_once() -> None:
    cold, warm = [9.0, 9.0, 9.0], [1.0, 2.0, 5.0]
    assert batch_seconds([cold, cold, warm, warm], 4, 64) == pytest.approx(1.0 + 2.0 * 14 + 5.0)
    assert batch_seconds([cold, cold, warm, warm], 6, 64) == pytest.approx(1.0 + 2.0 * (64 / 6 - 2) + 5.0)


def test_a_step_of_two_micro_steps_repeats_the_first() -> None:
    assert batch_seconds([[9.0, 9.0]] * 3 + [[1.0, 3.0]], 24, 64) == pytest.approx(3.0 + 1.0 * 64 / 24 - 1.0)


def test_a_run_without_a_batch_is_a_step_a_micro_batch() -> None:
    assert micro_steps_of(4, None) == 1
    assert batch_seconds([[9.0]] * 5 + [[2.0], [4.0]], 4, None) == 3.0


def test_no_more_micro_steps_are_accumulated_than_the_batch_has() -> None:
    assert [micro_steps_of(size, 64) for size in (1, 16, 24, 32, 48, 96)] == [3, 3, 2, 2, 1, 1]
