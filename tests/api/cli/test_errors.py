"""Whatever goes wrong is a few lines on stderr and an exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from filelock import Timeout
from typer.testing import CliRunner

from bexp.api.cli import main
from bexp.api.cli.commands import GuardedGroup, TerminatedError
from bexp.api.cli.connection import database_errors
from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.failures import describe_failure
from bexp.api.local_worker import WorkerEndedError
from bexp.client.errors import ProblemError
from bexp.explorer.formats.document import FormatError
from tests.api.cli.conftest import Finished, Run
from tests.api.cli.samples import TINY


def changed(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}))
    return path


def assert_usage(done: Finished, *parts: str) -> None:
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("bexp: ")
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize("command", ["explore", "submit"])
def test_a_configuration_that_breaks_rules_names_field_and_rule(bexp: Run, tmp_path: Path, command: str) -> None:
    model = {**TINY["model"], "num_attention_heads": 5}
    path = changed(tmp_path, model=model, tolerance=float("nan"))
    assert_usage(bexp(command, path), "tolerance", "finite")
    path = changed(tmp_path, model=model)
    assert_usage(bexp(command, path), "model", "hidden_size (64) must be a multiple of num_attention_heads (5)")
    path = changed(tmp_path, micro_batch_sizes=4)
    assert_usage(bexp(command, path), "micro_batch_sizes")
    path = changed(tmp_path, attention_backends=["flsh"])
    assert_usage(bexp(command, path), "attention_backends", "'flsh' (did you mean 'flash'?); there are cudnn,")


@pytest.mark.parametrize(
    ("content", "expected"), [(b"a: [1", "not valid YAML"), (b"\xff\xfe\x00\x00", "not a text file")]
)
def test_a_file_that_is_none(bexp: Run, tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    assert_usage(bexp("submit", path), expected)


def test_what_is_no_file_but_looks_like_something_else_is_answered_with_the_command_to_use(
    bexp: Run, tmp_path: Path
) -> None:
    assert_usage(bexp("submit", "Qwen/Qwen3-30B-A3B"), "hf download Qwen/Qwen3-30B-A3B config.json")
    assert_usage(bexp("submit", "train.py"), "train.py is Python", "--target train.py:CLASS")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "batch_size": 0}')
    assert_usage(bexp("submit", tmp_path), "batch_size: ")  # the folder's config.json was read
    assert_usage(
        bexp("submit", changed(tmp_path), "--set", "routing=zipf"), "routing: must be a mapping of its fields: "
    )
    assert_usage(bexp("best", "0000"), "no exploration begins with '0000'; `bexp list` shows them")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("http://h/config.json", "bexp reads files: download it first, for instance with curl -LO"),
        ("https://h/a", "bexp reads files: download it first, for instance with curl -LO"),
        (".", "the folder has no config.json"),
        ("a/b", "is it a model on the Hugging Face hub? bexp reads a file: hf download a/b config.json --local-dir ."),
        ("a/b.yaml", None),
        ("a/b/c", None),
        ("a", None),
        ("/a/b", None),
    ],
)
def test_a_path_that_cannot_be_read_is_told_with_what_it_may_have_meant(
    bexp: Run, given: str, hint: str | None
) -> None:
    first, *others = bexp("submit", given).stderr.splitlines()
    assert first.startswith("bexp: ") and first.endswith(f": {Path(given)}")
    assert others == ([] if hint is None else [f"  {hint}"])


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--micro-batch-size", "many", "--micro-batch-size 'many'"),
        ("--micro-batch-size", "8-2", "min (8) exceeds max (2)"),
        ("--device", "tpu", "--device 'tpu'"),
        ("--confidence-target", "100", "budget.confidence_target: "),
    ],
)
def test_an_option_out_of_range_names_it(bexp: Run, tmp_path: Path, option: str, value: str, expected: str) -> None:
    assert_usage(bexp("submit", changed(tmp_path), option, value), expected)


@pytest.mark.parametrize("arguments", [["nonsense"], ["submit"], ["list", "--state", "odd"], ["submit", "a", "--x"]])
def test_a_wrong_command_line_is_exit_2(bexp: Run, arguments: list[str]) -> None:
    done = bexp(*arguments)
    assert (done.code, done.stdout) == (2, "")


def test_nobody_at_the_url_is_exit_3(bexp: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("BEXP_API_URL", f"http://127.0.0.1:{port}")
    for arguments in (["submit", str(changed(tmp_path))], ["list"], ["best", "0123456789abcdef"]):
        done = bexp(*arguments)
        assert (done.code, done.stdout) == (3, "")
        assert done.stderr.startswith(f"bexp: no service answers at http://127.0.0.1:{port}\n")


def test_a_port_that_is_none_is_exit_2(bexp: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEXP_PORT", "odd")
    assert_usage(bexp("list"), "BEXP_PORT")


@pytest.mark.parametrize("url", ["mysql://me:secret@localhost/x", "nonsense", "sqlite:///:memory:"])
@pytest.mark.parametrize("command", ["db upgrade", "list"])
def test_a_database_that_is_not_supported_is_exit_2(
    bexp: Run, monkeypatch: pytest.MonkeyPatch, url: str, command: str
) -> None:
    monkeypatch.setenv("BEXP_DATABASE_URL", url)
    monkeypatch.delenv("BEXP_API_URL", raising=False)
    done = bexp(*command.split())
    assert_usage(done, "database")
    assert "secret" not in done.stderr


@pytest.mark.parametrize("arguments", [("db", "upgrade"), ("serve", "--port", "0")])
def test_a_file_that_is_no_database_is_exit_3(
    bexp: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "notes.txt").write_text("not a database " * 100)
    monkeypatch.setenv("BEXP_DATABASE_URL", f"sqlite:///{tmp_path / 'notes.txt'}")
    done = bexp(*arguments)
    assert (done.code, done.stdout) == (3, "")
    assert done.stderr.startswith("bexp: the database cannot be used: ")
    assert "file is not a database" in done.stderr


@pytest.mark.parametrize("url", ["nonsense", "localhost:8642", "ftp://host"])
def test_a_url_that_is_none_is_named(bexp: Run, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("BEXP_API_URL", url)
    done = bexp("list")
    assert done.code == 3
    assert f"{url!r} is not a URL of a service: it must start with http" in done.stderr


def test_a_database_that_does_not_answer_is_exit_3(bexp: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEXP_DATABASE_URL", "postgresql://nobody:secret@127.0.0.1:9/none")
    done = bexp("db", "upgrade")
    assert (done.code, done.stdout) == (3, "")
    assert done.stderr.startswith("bexp: the database cannot be used: ")
    assert "secret" not in done.stderr


def test_a_database_that_cannot_be_written_is_exit_3(bexp: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEXP_DATABASE_URL", "sqlite:////proc/bexp/bexp.db")
    assert bexp("db", "upgrade").code == 3


def test_a_log_file_that_cannot_be_written_is_no_reason_to_stop(bexp: Run, tmp_path: Path) -> None:
    Path("local_compile_train").write_text("a file in the way")
    job_id = bexp("submit", changed(tmp_path)).stdout.strip()
    bexp("cancel", job_id)
    done = bexp("watch", job_id, "--log-dir", ".")
    assert done.code == 1
    assert "no log file: " in done.stderr


def test_a_database_that_another_process_upgrades_for_too_long_is_told_so() -> None:
    with pytest.raises(CommandError, match="another process has been upgrading the database"), database_errors():
        raise Timeout("bexp.db.lock")


def test_an_unexpected_error_is_a_line_and_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("bexp.api.cli.jobs.connect", fail)
    monkeypatch.setattr("sys.argv", ["bexp", "list"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 3
    said = capsys.readouterr().err
    assert said.startswith("bexp: unexpected ZeroDivisionError: oh\n")
    assert "Traceback" not in said
    (file,) = tmp_path.glob("*.traceback")
    assert str(file) in said
    assert "ZeroDivisionError" in file.read_text()


@pytest.mark.parametrize(("status", "code"), [(2, 2), (1, 3), (3, 3), (-9, 3)])
def test_a_worker_that_ended_by_itself_is_exit_2_only_if_its_device_cannot_be_used(status: int, code: int) -> None:
    failure = describe_failure(WorkerEndedError("the worker ended", status))
    assert failure is not None
    assert failure.code == code


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 422, 425, 429])
def test_what_a_service_refuses_is_exit_2_unless_it_may_be_tried_again(status: int) -> None:
    failure = describe_failure(ProblemError(status, {"title": "No", "detail": "not so"}))
    assert failure is not None
    assert failure.code == (3 if status in {408, 425, 429} else 2)
    assert ("set BEXP_API_TOKEN to a token" in str(failure)) is (status == 401)


@pytest.mark.parametrize(("name", "extra"), [("fastapi.routing", "service"), ("mcp", "mcp"), ("x", None), (None, None)])
def test_a_package_of_an_extra_that_is_missing_is_named(name: str | None, extra: str | None) -> None:
    failure = describe_failure(ModuleNotFoundError(name=name))
    said = None if failure is None else (failure.code, failure.lines[0].partition("pip install ")[2])
    assert said == (None if extra is None else (2, f"'bexp[{extra}]'"))


def test_the_length_of_a_config_json_is_named_by_its_option() -> None:
    failure = describe_failure(
        FormatError([(("hf_seq_length",), "is missing"), (("seed",), "is odd"), (("batch_size",), "is odd")])
    )
    assert failure is not None
    assert failure.lines[1:] == ("hf_seq_length (--seq-length): is missing", "seed: is odd", "batch_size: is odd")


def test_version(bexp: Run) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", bexp("--version").stdout)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("12\nmany\n", "'many' in line 2 must be a whole number from 1 on"),
        ("\n", "it has no lengths"),
        (None, "No such file or directory: lengths.txt"),
    ],
)
def test_a_file_of_lengths_that_has_something_else_is_refused(
    bexp: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if text is not None:
        (tmp_path / "lengths.txt").write_text(text)
    assert_usage(bexp("explore", "config.json", "--seq-length", "64", "--lengths", "lengths.txt"), sentence)


def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(bexp: Run) -> None:
    done = bexp("explore", "config.json", "--execution", "jit")
    assert done.code == 2
    assert "'jit' is not one of 'eager', 'compile'," in done.stderr
    assert "Value error" not in done.stderr


def run(raised: BaseException | int) -> tuple[int, str]:
    """The exit status and the errors of a command that raises this, or is sent this signal."""
    app = typer.Typer(cls=GuardedGroup)
    app.callback()(lambda: None)

    @app.command()
    def act() -> None:
        if isinstance(raised, BaseException):
            raise raised
        os.kill(os.getpid(), raised)

    done = CliRunner().invoke(app, ["act"])
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (CommandError(ExitCode.NO_ANSWER, "nothing fits", "ask again"), 1, "bexp: nothing fits\n  ask again\n"),
        (CommandError(ExitCode.USAGE, "no such id"), 2, "bexp: no such id\n"),
        (CommandError(ExitCode.SERVICE, "it is away"), 3, "bexp: it is away\n"),
        (FileNotFoundError(2, "No such file", "a.yaml"), 3, "bexp: No such file: a.yaml\n"),
        (OSError(28, "No space left"), 3, "bexp: [Errno 28] No space left\n"),
        (OSError("no strerror"), 3, "bexp: no strerror\n"),
        (KeyboardInterrupt(), 130, ""),
        (TerminatedError(15), 143, ""),
        (typer.Exit(7), 7, ""),
    ],
    ids=str,
)
def test_each_failure_has_its_lines_and_its_status(raised: BaseException, status: int, said: str) -> None:
    assert run(raised) == (status, said)


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN])
def hangup(request: pytest.FixtureRequest) -> Iterator[signal.Handlers]:
    before = signal.signal(signal.SIGHUP, request.param)
    yield request.param
    assert signal.signal(signal.SIGHUP, before) is request.param, "the handler from before is back"


def test_a_signal_ends_the_command_unless_it_was_ignored(hangup: signal.Handlers) -> None:
    """As by `nohup`: a terminal that is closed does not end the command."""
    before = signal.getsignal(signal.SIGTERM)
    assert run(signal.SIGHUP) == ((0, "") if hangup is signal.SIG_IGN else (129, ""))
    assert run(signal.SIGTERM) == (143, "")
    assert signal.getsignal(signal.SIGTERM) is before
