from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bexp
from bexp.explorer.records.run_report import RunReport
from bexp.trainer.callback import SeenBatches
from bexp.trainer.model_setup import device_name
from bexp.trainer.recommended_setup import RecommendedSetup
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings
from tests.bexp.trainer.recommendations import document, told_of_a_config, with_adapters
from tests.bexp.transformers import models

ARGS = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=2)
STATE = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=100, num_input_tokens_seen=0)


def control(*, evaluates: bool = False, stops: bool = False) -> Any:
    return SimpleNamespace(should_evaluate=evaluates, should_save=False, should_training_stop=stops)


def step(callback: Any, state: Any = STATE, told: Any = None, micro_batches: int = 2) -> None:
    callback.on_step_begin(ARGS, state, told)
    for _ in range(micro_batches - 1):
        callback.on_substep_end(ARGS, state, told)
    callback.on_step_end(ARGS, state, told)


def train(callback: Any, steps: int = 5, model: Any = None, **arguments: Any) -> None:
    callback.on_train_begin(SimpleNamespace(**vars(ARGS), **arguments), STATE, None, model=model)
    for _ in range(steps):
        step(callback)
    callback.on_train_end(ARGS, STATE, None)


@pytest.fixture
def service() -> Iterator[tuple[str, list[tuple[str, str | None, Any]]]]:
    seen: list[tuple[str, str | None, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((self.path, self.headers["Authorization"], json.loads(body)))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_report_is_logged_and_posted(service: tuple[str, list[Any]], caplog: pytest.LogCaptureFixture) -> None:
    url, seen = service
    callback = bexp.TrainerCallback(document(), service=url, token="secret")
    with caplog.at_level(logging.INFO, "bexp"):
        train(callback)
    assert "of 1,000 promised" in caplog.text
    [(path, authorization, body)] = seen
    assert path == "/v1/explorations/exp-1/run-reports"
    assert authorization == "Bearer secret"
    assert RunReport.model_validate(body).applied is False
    assert body["hardware"] == device_name()
    assert body["steps"] == 2
    assert body["tokens_per_second"] == pytest.approx(2 * 4 * 2 * 12 / body["seconds"])


@pytest.mark.parametrize(
    ("execution", "optimizer", "applied"),
    [("eager", "adamw_torch_fused", True), ("graph", "adamw_torch_fused", False), ("eager", "adafactor", False)],
)
def test_a_run_that_was_not_as_measured_does_not_count_as_applied(
    execution: str, optimizer: str, applied: bool
) -> None:
    told, model = document(execution=execution), models.tiny("olmoe")
    bexp.apply(model, told)
    callback = bexp.TrainerCallback(told)
    model(**models.batch()).loss.backward()  # on the host there are no graphs
    train(callback, model=model, optim=optimizer)
    assert callback.report is not None
    assert callback.report.applied is applied


def test_a_service_that_does_not_answer_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    callback = bexp.TrainerCallback(document(), service="http://127.0.0.1:9")
    train(callback)
    assert callback.report is not None
    assert "was not sent" in caplog.text


def test_a_short_run_reports_nothing() -> None:
    callback = bexp.TrainerCallback(document())
    train(callback, steps=3)
    assert callback.report is None
    assert callback.comparison() == "nothing was measured: the first 3 steps warm up"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The callback's time, to be set. Other threads of the process keep theirs."""
    now = [0.0]
    monkeypatch.setattr("bexp.trainer.callback.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize("announced", [True, False])
def test_evaluations_are_left_out(now: list[float], announced: bool) -> None:
    callback = bexp.TrainerCallback(document())
    callback.on_train_begin(ARGS, STATE, None)
    for number in range(7):
        callback.on_step_begin(ARGS, STATE, None)
        now[0] += 1.0
        callback.on_step_end(ARGS, STATE, control(evaluates=announced and number in {4, 6}))
        if number in {4, 6}:
            now[0] += 50.0
            callback.on_evaluate(ARGS, STATE, None)
    now[0] += 30.0  # the best model is loaded
    callback.on_train_end(ARGS, STATE, None)
    assert callback.report is not None
    assert callback.report.seconds == pytest.approx(4.0)


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What a GPU says of its memory."""
    counted = {"allocated": 0, "reserved": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: counted["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: counted["reserved"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: counted.update(allocated=0, reserved=0))
    monkeypatch.setattr("bexp.trainer.callback.device_name", lambda: "a device")
    return counted


def test_the_memory_of_an_evaluation_is_left_out_and_that_of_graphs_counts(
    now: list[float], peak: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bexp.graphs.graphed_loss.GraphedLoss.held_bytes", 60)
    for graph in (False, True):
        model = models.tiny("llama")
        set_up(model, Settings(graph=graph))
        callback = bexp.TrainerCallback(document())
        callback.on_train_begin(ARGS, STATE, None, model=model)
        for number in range(6):
            now[0] += 1.0
            callback.on_step_begin(ARGS, STATE, None)
            peak.update({name: max(size, 100 + number) for name, size in peak.items()})
            callback.on_step_end(ARGS, STATE, control(evaluates=number == 4))
            if number == 4:
                peak.update(allocated=999, reserved=999)
                callback.on_evaluate(ARGS, STATE, None)
        callback.on_train_end(ARGS, STATE, None)
        assert callback.report is not None
        assert (callback.report.peak_bytes, callback.report.peak_reserved_bytes) == (105 + 60 * graph, 105)


def test_tokens_that_the_trainer_counts_come_first(now: list[float]) -> None:
    callback = bexp.TrainerCallback(document())
    state = SimpleNamespace(**vars(STATE) | {"train_batch_size": 3})
    callback.on_train_begin(ARGS, state, None)
    for _ in range(6):
        now[0] += 1.0
        state.num_input_tokens_seen += 70
        step(callback, state)
    callback.on_train_end(SimpleNamespace(**vars(ARGS), world_size=2), state, None)
    assert callback.report is not None
    assert callback.report.tokens_per_second == pytest.approx(35.0)
    assert callback.report.micro_batch_size == 3


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_checkpointing_that_replaces_the_policy_is_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = models.tiny("olmoe")
    for recompute, warned in (("partial_50", True), ("full", False)):
        told = document(recompute=recompute)
        bexp.apply(model, told)
        caplog.clear()
        arguments = SimpleNamespace(**vars(ARGS), **{name: True})
        bexp.TrainerCallback(told).on_train_begin(arguments, STATE, None, model=model)
        assert ("in place of the recommended recomputation" in caplog.text) is warned


def beginning(
    caplog: pytest.LogCaptureFixture, told: dict[str, Any], model: Any = None, **arguments: Any
) -> tuple[Any, list[str]]:
    """A callback at the beginning of training, and what it warned of."""
    caplog.clear()
    callback = bexp.TrainerCallback(told)
    callback.on_train_begin(SimpleNamespace(**vars(ARGS) | arguments), STATE, None, model=model)
    return callback, [record.getMessage().removeprefix("not as measured: ") for record in caplog.records]


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        ({"per_device_train_batch_size": 8}, "micro_batch_size 8, not the recommended 4"),
        ({"max_length": 1024}, "sequences of up to 1024 tokens, not 12"),
        ({"max_length": None}, None),
        ({"bf16": True, "fp16": False}, "products are computed under autocast of bfloat16, and were measured without"),
        ({"bf16": False, "fp16": False}, None),
        ({"optim": SimpleNamespace(value="adamw_torch")}, "optimizer adamw_torch, not adamw_torch_fused"),
        ({"optim": "adamw_torch_fused"}, None),
        ({"packing": True}, "packed documents that attend to themselves alone, not whole sequences"),
        ({"packing": True, "packing_strategy": "wrapped"}, None),
        ({"padding_free": True}, "documents in one row without padding, as many as a micro-batch has, not whole"),
        ({"gradient_checkpointing": True}, "gradient checkpointing recomputes every layer, in place of the recomm"),
    ],
)
def test_what_differs_is_said_when_training_begins_and_before_the_figures(
    arguments: dict[str, Any], difference: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    callback, warned = beginning(caplog, told_of_a_config({"precision": "pure"}), **arguments)
    size = {"per_device_train_batch_size": arguments.get("per_device_train_batch_size", 4)}
    for _ in range(5):
        step(callback)
    callback.on_train_end(SimpleNamespace(**size), STATE, None)
    if difference is None:
        assert warned == []
        assert callback.comparison()[0].isdigit()
    else:
        [line] = warned
        assert line.startswith(difference)
        assert callback.comparison().startswith(f"not as measured ({line}): ")


def test_the_trainers_process_that_is_not_the_first_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    callback = bexp.TrainerCallback(document())
    state = SimpleNamespace(**vars(STATE) | {"is_world_process_zero": False})
    callback.on_train_begin(SimpleNamespace(**vars(ARGS) | {"optim": "adafactor"}), state, None)
    assert caplog.records == []


def test_a_models_weights_adapters_and_checkpointing_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    assert beginning(caplog, told_of_a_config({"precision": "master"}), bf16=True)[1] == [], "its engine is told so"
    told = told_of_a_config({"precision": "pure"}, recompute="none")
    model = models.tiny("olmoe").to(torch.bfloat16)
    assert beginning(caplog, told, model)[1] == []
    [weights] = beginning(caplog, told, models.tiny("olmoe"))[1]
    assert "weights in bfloat16, and those of this model are in float32" in weights
    model.activation_checkpointing_enable()
    [recomputation] = beginning(caplog, told, model)[1]
    assert recomputation.startswith("gradient checkpointing recomputes every layer")
    told["recommendation"]["candidate"] |= {"recompute": "full"}
    assert beginning(caplog, told, model)[1] == []
    bexp.apply(model, told_of_a_config({"precision": "pure"}))
    assert beginning(caplog, told, model)[1] == ["recomputation 'partial_50', not 'full'"]
    bexp.restore(model)
    [adapters] = beginning(caplog, told, with_adapters(model))[1]
    assert "all weights trained, and this model has adapters" in adapters


@pytest.mark.parametrize(
    ("length", "padded", "measured", "differences"),
    [
        (12, False, None, []),
        (12, True, "padded", []),
        (12, True, None, ["padded sequences, not whole ones"]),
        (12, False, "grouped", ["whole sequences, not padded ones"]),
        (10, True, None, ["sequences of up to 10 tokens, not 12", "padded sequences, not whole ones"]),
        (10, True, "padded", []),
        (13, True, "padded", ["sequences of up to 13 tokens, not 12"]),
    ],
)
def test_the_batches_that_a_model_is_given_are_compared(
    length: int, padded: bool, measured: str | None, differences: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    told = told_of_a_config({"precision": "autocast"}, recompute="none")
    if measured is not None:
        told["job"]["request"] |= {"lengths": {"histogram": [[12, 3], [6, 1]]}, "batching": measured}
    model = models.tiny("olmoe")
    callback, [warned] = beginning(caplog, told, model, max_length=1024)
    assert warned == "sequences of up to 1024 tokens, not 12"
    model(**models.batch(length=length, padded=padded))
    model(input_ids=torch.ones(1, 40, dtype=torch.long), position_ids=torch.arange(40)[None] % 10)
    with torch.no_grad():
        model.eval()(**models.batch(length=20))
    for _ in range(5):
        step(callback)
    callback.on_train_end(ARGS, STATE, None)
    model.train()(**models.batch(length=30))
    text = callback.comparison()
    assert text.partition("not as measured (")[2].partition("): ")[0] == "; ".join(differences)


TEXTS = {"lengths": {"histogram": [[12, 3], [6, 1]]}}


@pytest.mark.parametrize(
    ("batching", "arguments", "differences"),
    [
        ("packed", {"packing": True}, []),
        ("packed", {"packing": False}, ["texts that are padded, not packed documents that attend to themselves alone"]),
        ("padded", {"packing": True}, ["packed documents that attend to themselves alone, not texts that are padded"]),
        ("packed", {"packing": True, "padding_free": True}, []),
        ("grouped", {"group_by_length": True}, []),
        ("padded", {"group_by_length": True}, ["texts in the order 'group_by_length', and padded ones were measured"]),
        ("padded", {"packing": False, "train_sampling_strategy": "random"}, []),
        ("grouped", {"train_sampling_strategy": "group_by_length"}, []),
    ],
)
def test_what_becomes_of_texts_is_compared(
    batching: str, arguments: dict[str, Any], differences: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    told = told_of_a_config({"precision": "pure"})
    told["job"]["request"] |= {**TEXTS, "batching": batching}
    assert beginning(caplog, told, **arguments)[1] == differences


@pytest.mark.parametrize(("counted", "tokens"), [(None, 10.5), ("all", 10.5), ("non_padding", 8.0)])
def test_padding_counts_for_nothing_where_texts_were_measured(
    counted: str | None, tokens: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A sequence has the mean of the texts, unless the Trainer counts them itself: here 8 tokens each."""
    told = told_of_a_config({"precision": "pure"})
    told["job"]["request"] |= TEXTS
    told["recommendation"]["texts"] = {"tokens_per_sequence": 10.5}
    callback, _ = beginning(caplog, told)
    state = SimpleNamespace(**vars(STATE) | {"num_input_tokens_seen": 0})
    args = SimpleNamespace(**vars(ARGS) | {"include_num_input_tokens_seen": counted})
    for _ in range(6):
        callback.on_step_begin(args, state, None)
        callback.on_substep_end(args, state, None)
        state.num_input_tokens_seen += 2 * 4 * 8
        callback.on_step_end(args, state, None)
    callback.on_train_end(args, state, None)
    report = callback.report
    assert report is not None
    per_step = report.tokens_per_second * report.seconds / report.steps
    assert per_step == pytest.approx(2 * 4 * tokens, rel=0.01)


def test_one_sequence_without_padding_may_be_whole_or_of_unequal_lengths() -> None:
    setup, model = RecommendedSetup.read(told_of_a_config({"precision": "autocast"})), models.tiny("olmoe")
    for measured, num_tokens, differences in (
        ("padded", 8, []),
        ("full", 8, []),
        ("full", 6, ["padded sequences, not whole ones"]),
    ):
        seen = SeenBatches()
        seen.watch(model)
        model(input_ids=torch.ones(1, 8, dtype=torch.long), attention_mask=(torch.arange(8)[None] < num_tokens).long())
        seen.stop()
        assert list(seen.padding_difference(replace(setup, batching=measured))) == differences


def train_with_transformers(folder: Path, *, tuned: bool) -> tuple[list[float], Any]:
    from transformers import Trainer, TrainingArguments

    told = document()
    told["job"]["request"]["model"]["dtype"] = "float32"
    told["job"]["request"]["batch_size"] = 8
    model = models.tiny("olmoe")
    callback = bexp.TrainerCallback(told)
    if tuned:
        bexp.apply(model, told)
    rows = models.batch(48)
    dataset = [{key: value[i] for key, value in rows.items()} for i in range(48)]
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        max_steps=6,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        **bexp.training_arguments(told, world_size=1),
    )
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[callback])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], callback


@pytest.mark.filterwarnings("default")
def test_a_trainer_reaches_the_same_losses_on_a_model_that_is_set_up(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    plain, _ = train_with_transformers(tmp_path / "plain", tuned=False)
    tuned, callback = train_with_transformers(tmp_path / "tuned", tuned=True)
    assert len(plain) == 6
    assert tuned == pytest.approx(plain, rel=1e-3)
    assert callback.report.steps == 3
    assert callback.report.applied
    assert callback.report.micro_batch_size == 4
    assert torch.isfinite(torch.tensor(callback.report.tokens_per_second))
