"""A sample of a Cosmic Ray session, in the tables that it writes."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from benchmarks import mutants

TABLES = """
CREATE TABLE work_items (job_id VARCHAR PRIMARY KEY);
CREATE TABLE mutation_specs (module_path VARCHAR, operator_name VARCHAR, operator_args JSON, start_pos_row INTEGER,
  start_pos_col INTEGER, job_id VARCHAR PRIMARY KEY);
CREATE TABLE work_results (worker_outcome VARCHAR, test_outcome VARCHAR, job_id VARCHAR PRIMARY KEY);
"""


def session_of(path: Path, jobs: list[int]) -> Path:
    with sqlite3.connect(path) as session:
        session.executescript(TABLES)
        session.executemany("INSERT INTO work_items VALUES (?)", [(f"{job * 37 % 101}",) for job in jobs])
        specs = [("explorer/a.py", "core/AddNot", '"{}"', job, 0, f"{job * 37 % 101}") for job in jobs]
        session.executemany("INSERT INTO mutation_specs VALUES (?, ?, ?, ?, ?, ?)", specs)
    return path


def lines_of(path: Path) -> list[int]:
    with sqlite3.connect(path) as session:
        (items,) = session.execute("SELECT count(*) FROM work_items").fetchone()
        found = [row[0] for row in session.execute("SELECT start_pos_row FROM mutation_specs ORDER BY 1")]
    assert items == len(found)
    return found


def test_a_seed_draws_the_same_mutants_in_whatever_order_they_were_found(tmp_path: Path) -> None:
    first, second = session_of(tmp_path / "1", [*range(100)]), session_of(tmp_path / "2", [*reversed(range(100))])
    other = session_of(tmp_path / "3", [*range(100)])
    for path, seed in ((first, "5"), (second, "5"), (other, "6")):
        mutants.main([str(path), "--keep", "10", "--seed", seed])
    assert len(lines_of(first)) == 10
    assert lines_of(first) == lines_of(second) != lines_of(other)


def test_what_was_judged_is_listed_by_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = session_of(tmp_path / "session", [3, 1, 2, 4])
    with sqlite3.connect(path) as session:
        outcomes = {1: ("NORMAL", "KILLED"), 2: ("NORMAL", "SURVIVED"), 3: ("SKIPPED", None)}
        rows = [(*outcome, f"{job * 37 % 101}") for job, outcome in outcomes.items()]
        session.executemany("INSERT INTO work_results VALUES (?, ?, ?)", rows)
    mutants.main([str(path)])
    assert capsys.readouterr().out.splitlines() == [
        "killed    explorer/a.py:1 AddNot",
        "survived  explorer/a.py:2 AddNot",
        "1 of 2 killed",
    ]
