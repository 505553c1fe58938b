"""The logic around CUDA graphs, with a recorder that runs the work again where a graph would be replayed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bexp
from bexp.graphs.graphed_loss import MAX_SIGNATURES, GraphedLoss
from bexp.graphs.recorder import NotCapturableError
from bexp.transformers.graph import GraphedForward, graphed
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings
from tests.bexp.kernels.references import assert_same_values
from tests.bexp.trainer.recommendations import document
from tests.bexp.transformers import models


class Repeater:
    """Stands for the recorder of a CUDA device: nothing runs when it is recorded, everything when it is repeated."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.repeats = 0

    @property
    def pool_bytes(self) -> int:
        return 7

    def find_problem(self, tensors: Sequence[Tensor]) -> str | None:
        return None

    def warm_up(self, work: Callable[[], None]) -> None:
        work()
        if self.failure is not None:
            raise self.failure

    def record(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        def repeated(work: Callable[[], None]) -> Callable[[], None]:
            def repeat() -> None:
                self.repeats += 1
                with torch.enable_grad():
                    work()

            return repeat

        return [repeated(work) for work in works]


class Net(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        loss: Tensor = self.layers(x).square().mean()
        return loss


def pair(failure: Exception | None = None) -> tuple[Net, Net, GraphedLoss, Repeater]:
    plain, net = Net(), Net()
    recorder = Repeater(failure)
    return plain, net, GraphedLoss(net, net.forward, recorder=recorder), recorder


def gradients(net: Net) -> list[Tensor | None]:
    return [parameter.grad for parameter in net.parameters()]


def draw(number: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_clipped_steps_end_in_the_same_weights(set_to_none: bool) -> None:
    plain, net, graphed_loss, recorder = pair()
    losses: list[list[Tensor]] = [[], []]
    for model, loss_of, kept in ((plain, plain, losses[0]), (net, graphed_loss, losses[1])):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(4):
            for micro_step in range(2):
                loss = loss_of(x=draw(2 * step + micro_step))
                kept.append(loss.detach())  # must not change when the next micro-step is replayed
                (loss / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert recorder.repeats == 16
    assert_same_values(losses[1], losses[0])
    assert_same_values(net.parameters(), plain.parameters())


def test_a_capture_in_the_middle_of_an_accumulation_changes_neither_gradients_nor_buffers() -> None:
    plain, net, graphed_loss, recorder = pair()
    for rows in (3, 2, 3):
        plain(draw(rows, rows)).backward()
        graphed_loss(x=draw(rows, rows)).backward()
    assert (graphed_loss.num_captures, graphed_loss.held_bytes, graphed_loss.always_replays) == (2, 7, True)
    assert recorder.repeats == 6
    assert net.calls == 3
    assert_same_values(gradients(net), gradients(plain))


def test_calls_that_no_graph_can_serve_run_as_they_are() -> None:
    _, net, graphed_loss, recorder = pair()
    with torch.no_grad():
        graphed_loss(x=draw(0))
    net.eval()
    graphed_loss(x=draw(0))
    net.train()
    graphed_loss(x=draw(0).requires_grad_()).backward()
    assert recorder.repeats == 0
    for rows in range(1, MAX_SIGNATURES + 3):
        graphed_loss(x=draw(rows, rows)).backward()
    assert (graphed_loss.num_captures, graphed_loss.always_replays) == (MAX_SIGNATURES, False)
    assert recorder.repeats == 2 * MAX_SIGNATURES
    assert graphed_loss.problem is None


def test_a_second_forward_before_the_backward_runs_as_it_is() -> None:
    plain, net, graphed_loss, recorder = pair()
    (graphed_loss(x=draw(0)) + graphed_loss(x=draw(1))).backward()
    (plain(draw(0)) + plain(draw(1))).backward()
    assert recorder.repeats == 2
    assert_same_values(gradients(net), gradients(plain))
    graphed_loss(x=draw(2))  # a loss that nobody keeps holds nothing up
    loss = graphed_loss(x=draw(3))
    loss.backward(retain_graph=True)
    assert recorder.repeats == 5
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("failure", [NotCapturableError("it waits"), torch.OutOfMemoryError("full")])
def test_a_failed_capture_says_why_once_and_changes_nothing(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    plain, net, graphed_loss, _ = pair(failure)
    with caplog.at_level("WARNING"):
        for number in range(3):
            graphed_loss(x=draw(number)).backward()
            plain(draw(number)).backward()
    assert str(failure) in str(graphed_loss.problem)
    assert graphed_loss.error is failure
    assert len(caplog.records) == 1
    assert net.calls == 3
    assert_same_values(gradients(net), gradients(plain))


def test_parameters_that_moved_are_captured_again() -> None:
    _, net, graphed_loss, recorder = pair()
    graphed_loss(x=draw(0)).backward()
    net.layers[0] = nn.Linear(4, 8)
    wanted = net(draw(1))
    torch.testing.assert_close(graphed_loss(x=draw(1)), wanted)
    assert recorder.repeats == 3
    net.layers[0].requires_grad_(False)
    net.zero_grad()
    graphed_loss(x=draw(1)).backward()
    assert net.layers[0].weight.grad is None


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "calls", torch.full((), 5.0)),
        lambda net: net.layers.append(nn.Dropout(0.0)),
        lambda net: net.layers[1].eval(),
    ],
    ids=["buffer", "part", "mode"],
)
def test_a_model_that_is_another_than_was_captured_is_captured_again(change: Callable[[Net], object]) -> None:
    _, net, graphed_loss, recorder = pair()
    graphed_loss(x=draw(0)).backward()
    first = graphed_loss._steps.copy()
    change(net)
    calls = int(net.calls)
    for _ in range(2):
        graphed_loss(x=draw(0)).backward()
    assert (int(net.calls), recorder.repeats) == (calls + 2, 6)
    assert graphed_loss.num_captures == 1
    for found, kept in zip(graphed_loss._steps.values(), first.values(), strict=True):
        assert found is not kept


def test_a_buffer_that_the_model_replaces_is_refused_and_has_the_right_values() -> None:
    class Replacing(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            loss: Tensor = self.layers(x).square().mean()
            return loss

    net, recorder = Replacing(), Repeater()
    graphed_loss = GraphedLoss(net, net.forward, recorder=recorder)
    for _ in range(2):
        graphed_loss(x=draw(0)).backward()
    assert "'calls' is replaced" in str(graphed_loss.problem)
    assert (int(net.calls), recorder.repeats) == (2, 0)


def test_parameters_that_are_used_without_their_modules_are_refused() -> None:
    _, net, _, recorder = pair()
    weight = next(net.parameters())
    loss = GraphedLoss(net, lambda x: net(x) + weight.square().sum(), recorder=recorder)
    weight.grad = torch.ones_like(weight)
    loss(x=draw(0)).backward()
    assert "without the modules" in str(loss.problem)
    assert recorder.repeats == 0
    assert not torch.equal(weight.grad, torch.ones_like(weight))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda net: next(net.parameters()).register_post_accumulate_grad_hook(lambda _: None), "hooks"),
        (lambda net: net.layers[0].register_full_backward_hook(lambda *_: None), "hooks"),
        (lambda net: net.requires_grad_(False), "no parameter"),
    ],
    ids=["parameter", "module", "frozen"],
)
def test_models_whose_gradients_do_not_simply_add_up_are_refused(change: Callable[[Net], object], reason: str) -> None:
    _, net, graphed_loss, recorder = pair()
    change(net)
    graphed_loss(x=draw(0))
    assert reason in str(graphed_loss.problem)
    assert recorder.repeats == 0


@contextmanager
def recorded_by(model: Any, recorder: Repeater) -> Iterator[GraphedForward]:
    """The model set up, with another recorder."""
    applied = set_up(model, Settings(loss="chunked", graph=True))
    found = graphed(model)
    assert found is not None
    found.loss._recorder = recorder
    yield found
    applied.undo()
    assert graphed(model) is None


@pytest.mark.parametrize("model_type", ["llama", "olmoe", "gpt2"])
def test_a_transformers_model_trains_alike_and_its_mask_of_ones_is_left_out(model_type: str) -> None:
    model, recorder = models.tiny(model_type), Repeater()
    batch = models.batch()
    wanted = models.step(model, batch)
    with recorded_by(model, recorder) as forward:
        models.assert_same(models.step(model, batch), wanted)
        masked = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
        models.assert_same(models.step(model, masked), wanted)
        assert (recorder.repeats, forward.loss.num_captures) == (4, 1)
        output = model(**batch, num_items_in_batch=7)
        assert output.logits is None
        output.loss.backward()
        model.zero_grad()
        assert model(input_ids=batch["input_ids"]).logits is not None
        padded = models.batch(padded=True)
        with_padding = models.step(model, padded)
        assert forward.loss.num_captures == 3
    models.assert_same(with_padding, models.step(model, padded))


def test_the_wrapped_forward_has_the_signature_of_the_model_and_copies_do_not_share_graphs() -> None:
    model = models.tiny("llama")
    signature = inspect.signature(model.forward)
    with recorded_by(model, Repeater()) as forward:
        assert inspect.signature(model.forward) == signature
        assert set(model.state_dict()) == set(models.tiny("llama").state_dict())
        copied = graphed(copy.deepcopy(model))
        assert copied is not None
        assert copied is not forward
        assert copied._model is not model
        assert getattr(copied._plain, "__self__", None) is copied._model


def test_apply_takes_another_execution_and_says_why_a_host_has_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = models.tiny("olmoe"), models.batch()
    wanted = models.step(model, batch)
    report = bexp.apply(model, document(), execution="graph")
    assert report.recommendation.settings.graph
    there = torch.cuda.is_available()
    assert ("the micro-step replayed as CUDA graphs" in str(report)) is there
    assert ("no CUDA graphs, because torch finds no GPU here" in str(report)) is not there
    with caplog.at_level("WARNING"):
        models.assert_same(models.step(model, batch), wanted)
    assert "need a CUDA device" in caplog.text
    with pytest.raises(ValueError, match="compile\\+graph"):
        bexp.apply(model, document(), execution="fast")
