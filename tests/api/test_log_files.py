"""Log files hold each line once: those that a service keeps where it is told to, and those of commands."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bexp.api import background
from bexp.api.background import LogFolder
from bexp.api.cli.following import open_run_log
from bexp.api.run_log import RunLog, log_path
from bexp.api.settings import ServiceSettings
from bexp.client.explorations import Exploration
from bexp.explorer.records.event import render_line
from bexp.storage.events import read_events
from bexp.storage.pruning import delete_job
from bexp.storage.queue import Queue
from tests.api.cli.samples import EVENTS, job_document
from tests.api.serving import in_process
from tests.contracts.samples import make_request
from tests.waits import wait_until


def text_of(queue: Queue, job_id: str) -> str:
    return "".join(render_line(event) + "\n" for event in read_events(queue.database, job_id))


def test_every_log_is_kept_and_goes_on_after_a_restart(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "read_events", partial(read_events, limit=1))
    train, evaluated = queue.enqueue(make_request())[0], queue.enqueue(make_request(mode="eval"))[0]
    folder = LogFolder(queue.database, tmp_path)
    folder.write()
    paths = {
        train.id: log_path(tmp_path, "train", train.model_name, train.id),
        evaluated.id: log_path(tmp_path, "eval", evaluated.model_name, evaluated.id),
    }
    assert {job_id: path.read_text() for job_id, path in paths.items()} == {i: text_of(queue, i) for i in paths}
    queue.request_cancel(train.id)
    for writer in (folder, LogFolder(queue.database, tmp_path)):
        writer.write()
        assert paths[train.id].read_text() == text_of(queue, train.id)
    assert "cancelled" in paths[train.id].read_text()


def test_a_file_that_another_process_writes_is_left_to_it(queue: Queue, tmp_path: Path) -> None:
    job = queue.enqueue(make_request())[0]
    path, folder = log_path(tmp_path, "train", job.model_name, job.id), LogFolder(queue.database, tmp_path)
    with RunLog(path):
        folder.write()
        assert path.read_text() == ""
    folder.write()
    assert path.read_text() == text_of(queue, job.id)


def test_a_file_that_cannot_be_written_keeps_no_other_waiting(queue: Queue, tmp_path: Path) -> None:
    jobs = [queue.enqueue(make_request())[0] for _ in range(3)]
    paths = [log_path(tmp_path, "train", job.model_name, job.id) for job in jobs]
    folder = LogFolder(queue.database, tmp_path)
    paths[1].mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        folder.write()
    paths[1].rmdir()
    written = [path.exists() for path in paths]
    folder.write()
    assert written == [True, False, True]
    assert paths[1].read_text() == text_of(queue, jobs[1].id)


def test_an_exploration_that_is_deleted_meanwhile_is_no_fault(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = queue.enqueue(make_request())[0]
    queue.request_cancel(job.id)
    delete_job(queue.database, job.id)
    monkeypatch.setattr(background, "read_last_seqs", lambda database: {job.id: 2})
    LogFolder(queue.database, tmp_path / "logs").write()
    assert not (tmp_path / "logs").exists()


def test_a_service_writes_files_where_it_is_told_to(settings: ServiceSettings, queue: Queue, tmp_path: Path) -> None:
    job = queue.enqueue(make_request())[0]
    path = log_path(tmp_path / "logs", "train", job.model_name, job.id)
    with in_process(replace(settings, log_dir=tmp_path / "logs")):
        wait_until(lambda: path.exists() and path.read_text())
    assert path.read_text() == text_of(queue, job.id)


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
