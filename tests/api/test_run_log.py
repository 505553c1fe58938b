"""The log file holds each line once, whoever watches how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from bexp.api.cli.following import open_run_log
from bexp.api.run_log import RunLog, log_path
from bexp.client.explorations import Exploration
from bexp.explorer.records.event import render_line
from tests.api.cli.samples import EVENTS, job_document

LINES = [render_line(event) for event in EVENTS]


def write(path: Path, count: int) -> None:
    with RunLog(path) as log:
        for event in EVENTS[:count]:
            log.write(event)


def test_path_is_where_a_cerebras_user_looks(tmp_path: Path) -> None:
    assert log_path(tmp_path, "eval", "gpt2", "abc") == tmp_path / "local_compile_eval" / "gpt2" / "run_abc.log"


@pytest.mark.parametrize("name", ["x/../../../../evil/pwn", "..", "../x", "/etc/x", "", ".ssh", "a\0b", "x" * 500])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "local_compile_train"
    for path in (log_path(tmp_path, "train", name, "abc"), log_path(tmp_path, "train", "gpt2", name)):
        assert path.resolve().parent.parent == folder
        with RunLog(path):
            assert path.is_file()


@pytest.mark.parametrize(
    ("name", "file"), [("x" * 129, "x" * 128), ("Llama 3.2_1-B", "Llama 3.2_1-B"), ("a/b:c", "a-b-c"), ("", "-")]
)
def test_a_name_is_a_part_of_a_path_of_128_letters_at_most(tmp_path: Path, name: str, file: str) -> None:
    assert log_path(tmp_path, "train", name, "abc").parent.name == file


def test_watching_again_adds_only_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run.log"
    for count in (3, 2, 5, 5):
        write(path, count)
    assert path.read_text().splitlines() == LINES


def test_an_unfinished_line_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(f"{LINES[0]}\n{LINES[1][:9]}")
    write(path, 5)
    assert path.read_text().splitlines() == LINES


def test_only_one_of_two_writes(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with RunLog(path) as first, RunLog(path) as second:
        assert (first.is_writing, second.is_writing) == (True, False)
        for event in EVENTS:
            first.write(event)
            second.write(event)
    assert path.read_text().splitlines() == LINES


def test_whoever_watches_is_told_where_the_log_is_and_who_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, unread = map(Exploration.model_validate, (job_document(), job_document(request=None)))
    path = tmp_path / "local_compile_train" / "tiny" / "run_job1.log"
    with open_run_log(job, tmp_path) as first, open_run_log(job, tmp_path) as second:
        assert first is not None and second is not None
        assert (first.is_writing, second.is_writing) == (True, False)
    assert capsys.readouterr().err == f"log file: {path}\nlog file: {path} (another command writes it)\n"
    for other, folder in ((job, None), (unread, tmp_path)):
        with open_run_log(other, folder) as none:
            assert none is None
    assert capsys.readouterr().err == ""
