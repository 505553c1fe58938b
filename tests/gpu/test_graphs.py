"""Micro-steps as CUDA graphs: exact against eager, and harmless where they cannot be captured."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import bexp
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.request.request import ExplorationRequest
from bexp.graphs.graphed_loss import GraphedLoss
from bexp.transformers.graph import graphed
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.profiler.hardware import measure_hardware
from bexp.workers.profiler.trials.whole_model import run_whole_model
from bexp.workers.targets.reference.target import ReferenceTrainingRun
from bexp.workers.targets.transformers.target import TransformersTarget
from tests.bexp.trainer.recommendations import document
from tests.gpu.needs import one_gpu

pytestmark = one_gpu()
transformers = pytest.importorskip("transformers")
DEVICE = torch.device("cuda", 0)
STEPS, MICRO_STEPS = 4, 2

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TYPES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "olmoe": {**SIZES, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt2": {"vocab_size": 1024, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256},
}


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def build(model_type: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**TYPES[model_type], **changed})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE).train()


def loss_of(model: Any) -> GraphedLoss:
    forward = graphed(model)
    assert forward is not None
    return forward.loss


def batches(size: int = 2, length: int = 128) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, 1024, (size, length), generator=generator) for _ in range(STEPS * MICRO_STEPS)]
    return [{"input_ids": tokens.to(DEVICE), "labels": tokens.to(DEVICE)} for tokens in drawn]


def train(model: Any, *, set_to_none: bool = True, autocast: bool = False) -> tuple[list[float], list[Tensor]]:
    """Losses of all micro-steps, and the gradients of the first step before they are clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses: list[Tensor] = []
    first: list[Tensor] = []
    torch.manual_seed(7)
    given = batches()
    for step in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(**given[step * MICRO_STEPS + micro_step], use_cache=False).loss
            losses.append(loss.detach())
            (loss / MICRO_STEPS).backward()
            del loss
        if not first:
            first = [parameter.grad.clone() for parameter in model.parameters()]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return [float(loss) for loss in losses], first


def assert_alike(
    found: tuple[list[float], list[Tensor]], wanted: tuple[list[float], list[Tensor]], tolerance: float
) -> None:
    """Kernels of attention add up gradients in any order, so only the first loss is the same to the last bit."""
    assert found[0][0] == wanted[0][0]
    assert found[0] == pytest.approx(wanted[0], rel=tolerance)
    for mine, other in zip(found[1], wanted[1], strict=True):
        error = float((mine - other).norm() / other.norm().clamp(min=1e-12))
        assert error <= tolerance


FULL, BF16 = 2e-5, 2e-2
CASES: dict[str, tuple[str, dict[str, Any], Settings, dict[str, Any], float]] = {
    "llama": ("llama", {}, Settings(), {}, FULL),
    "llama, zeroed in place": ("llama", {}, Settings(), {"set_to_none": False}, FULL),
    "llama, chunked loss": ("llama", {}, Settings(loss="chunked"), {}, FULL),
    "llama, recomputed": ("llama", {}, Settings(recompute="full"), {}, FULL),
    "llama, activations": ("llama", {}, Settings(recompute="activations"), {}, FULL),
    "llama, core": ("llama", {}, Settings(recompute="selective"), {}, FULL),
    "llama, tiles": ("llama", {}, Settings(bta_tile=1), {}, FULL),
    "llama, autocast": ("llama", {}, Settings(), {"autocast": True}, BF16),
    "llama, compiled": ("llama", {}, Settings(compile=True), {}, FULL),
    "gpt2 with dropout": ("gpt2", {}, Settings(), {}, FULL),
    "olmoe, grouped_mm": ("olmoe", {"dtype": torch.bfloat16}, Settings(experts="grouped_mm"), {}, BF16),
    "olmoe, fused": ("olmoe", {"dtype": torch.bfloat16}, Settings(experts="bexp_fused", loss="chunked"), {}, BF16),
    "olmoe, hopper": ("olmoe", {"dtype": torch.bfloat16}, Settings(experts="bexp_hopper_grouped"), {}, BF16),
    "olmoe, compiled": ("olmoe", {"dtype": torch.bfloat16}, Settings(experts="bexp_fused", compile=True), {}, BF16),
}


COMPILED = pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own parts, and of full float32


@pytest.mark.parametrize("case", [pytest.param(case, marks=[COMPILED] * ("compiled" in case)) for case in CASES])
def test_steps_are_those_of_eager(case: str) -> None:
    model_type, changed, settings, how, tolerance = CASES[case]
    if "hopper" in case and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    plain = build(model_type, **changed)
    set_up(plain, settings)
    wanted = train(plain, **how)
    model = build(model_type, **changed)
    set_up(model, replace(settings, graph=True))
    found = train(model, **how)
    assert (loss_of(model).problem, loss_of(model).num_captures) == (None, 1)
    assert_alike(found, wanted, tolerance)


def test_dropout_draws_new_numbers_at_every_replay_and_a_mask_of_ones_is_left_out() -> None:
    model = build("gpt2")
    set_up(model, Settings(graph=True))
    batch = batches()[0]
    losses = []
    for _ in range(3):
        loss = model(**batch, attention_mask=torch.ones_like(batch["input_ids"]), num_items_in_batch=254).loss
        loss.backward()
        losses.append(loss.item())
    assert (loss_of(model).problem, loss_of(model).num_captures) == (None, 1)
    assert len(set(losses)) == 3


def test_padded_texts_are_masked_as_in_eager() -> None:
    batch = batches()[0]
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 100:] = 0
    losses = []
    for graph in (False, True):
        model = build("llama")
        set_up(model, Settings(graph=graph))
        loss = model(**batch, attention_mask=mask, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        problem = None if (forward := graphed(model)) is None else forward.loss.problem
        assert problem is None
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_dropout_that_is_recomputed_is_refused_with_its_reason() -> None:
    model = build("gpt2")
    set_up(model, Settings(recompute="full", graph=True))
    batch = batches()[0]
    model(**batch, use_cache=False).loss.backward()
    assert "random numbers" in str(loss_of(model).problem)


def test_an_earlier_loss_that_is_still_alive_is_not_in_the_way() -> None:
    model = build("llama")
    batch = batches()[0]
    kept = model(**batch, use_cache=False).loss
    set_up(model, Settings(graph=True))
    model(**batch, use_cache=False).loss.backward()
    assert loss_of(model).problem is None
    found = [parameter.grad.clone() for parameter in model.parameters()]
    kept.backward()
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient, rtol=1e-4, atol=1e-6)


def test_gradients_and_activations_are_held_once() -> None:
    peaks = []
    for graph in (False, True):
        model = build("llama", num_hidden_layers=8, hidden_size=1024, intermediate_size=4096, num_attention_heads=8)
        set_up(model, Settings(graph=graph))
        for _ in range(2):
            model(**batches(8)[0], use_cache=False).loss.backward()
        torch.cuda.synchronize()
        if not graph:
            torch.cuda.reset_peak_memory_stats()
            model(**batches(8)[0], use_cache=False).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del model
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    assert peaks[1] <= 1.05 * peaks[0] + 2**24


class Waiting(nn.Module):
    """Waits for the device: by reading a value, or in a way that torch does not tell before a capture."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.layer(x), 0.5)
        if self.hidden:
            torch.cuda.synchronize()
        elif y.sum().item() > 1e9:
            y = 2 * y
        return y.square().mean()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_model_that_waits_for_the_device_goes_on_as_it_is(hidden: bool) -> None:
    model = Waiting(hidden=hidden).to(DEVICE)
    loss = GraphedLoss(model, model.forward)
    x = torch.randn(4, 16, device=DEVICE)
    torch.manual_seed(3)
    found = [loss(x=x) for _ in range(2)]
    torch.manual_seed(3)
    wanted = [model(x) for _ in range(2)]
    torch.testing.assert_close(found, wanted)
    assert loss.problem is not None
    assert len(loss.problem.splitlines()) == 1
    torch.stack(found).sum().backward()
    assert model.layer.weight.grad is not None
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        model(x).backward()
    assert torch.cuda.memory_allocated() <= before + 4096
    other = build("llama")  # nothing of the attempt is left that would be in the way of another model
    set_up(other, Settings(graph=True))
    other(**batches()[0], use_cache=False).loss.backward()
    assert loss_of(other).problem is None


class Trained(NamedTuple):
    losses: list[float]
    weights: list[Tensor]
    graph_bytes: int


def train_reference(execution: str, recompute: str, experts: str | None) -> Trained:
    """A whole model of the reference layers in bf16, with float32 gradients that hooks add up."""
    moe = None if experts is None else {"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 256}
    sizes = {
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_attention_heads": 4,
        "vocab_size": 1024,
        "seq_length": 128,
    }
    request = ExplorationRequest.model_validate(
        {"model": {"num_layers": 2, "dtype": "bfloat16", "moe": moe, **sizes}, "execution": execution, "batch_size": 8}
    )
    candidate = Candidate.model_validate(
        {"micro_batch_size": 2, "attention_backend": "flash", "recompute": recompute, "expert_backend": experts}
        | {"num_query_groups": request.shapes.query_groups}
    )
    run = ReferenceTrainingRun(Instruments(DEVICE), request.shapes, candidate, request)
    run.begin()
    for _ in range(2):
        run.step()
    run.finish()
    assert run.optimizer is not None
    with torch.no_grad():
        losses = [float(run._model(*batch)) for batch in run._batches]
    return Trained(losses, [parameter.detach().float() for parameter in run._model.parameters()], run.graph_bytes)


@pytest.mark.parametrize("experts", [None, "grouped_mm", "fused"])
@pytest.mark.parametrize("recompute", ["none", "full", "activations"])
def test_whole_models_of_reference_layers_train_alike(recompute: str, experts: str | None) -> None:
    eager = train_reference("eager", recompute, experts)
    graph = train_reference("graph", recompute, experts)
    assert (eager.graph_bytes, graph.graph_bytes > 0) == (0, True)
    assert graph.losses == pytest.approx(eager.losses, rel=2e-2)
    if experts is None:
        assert graph.losses != pytest.approx([math.log(1024)] * 2, rel=1e-4), "nothing was learnt"


@pytest.mark.alone
def test_a_target_of_transformers_reports_and_runs_graphs() -> None:
    asked = {"hf_config": {"model_type": "llama", **SIZES}, "hf_seq_length": 128, "batch_size": 8}
    request = ExplorationRequest.model_validate({**asked, "execution": "explore"})
    target = TransformersTarget(request, Instruments(DEVICE))
    report = target.report(measure_hardware(DEVICE, 0))
    assert report.parts is not None
    assert {support.name: support.reason for support in report.choices["execution"]} == dict.fromkeys(Execution)
    peaks = {}
    for execution in (Execution.EAGER, Execution.GRAPH):
        candidate = Candidate(
            micro_batch_size=4, attention_backend="sdpa", num_query_groups=1, loss="library", execution=execution
        )
        clock = PhaseClock()
        peaks[execution] = run_whole_model(target._instruments, target, report.parts, candidate, request, clock)
    eager, graph = (peaks[execution] for execution in (Execution.EAGER, Execution.GRAPH))
    assert graph.micro_step_seconds < eager.micro_step_seconds
    assert 0.9 * eager.peak_bytes < graph.peak_bytes < 1.5 * eager.peak_bytes + 2**25


def test_a_trainer_replays_and_reaches_the_losses_of_eager(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    losses = []
    for execution in ("eager", "graph"):
        told = document()
        told["job"]["request"]["batch_size"] = 8
        told["recommendation"]["candidate"] |= {"recompute": "none", "bta_tile": None, "expert_backend": "grouped_mm"}
        model = build("olmoe", torch.bfloat16, num_experts=6)  # grouped products in float32 wait for the device
        told["job"]["request"].pop("model")
        bexp.apply(model, told, execution=execution)
        rows = [{"input_ids": row, "labels": row} for batch in batches() for row in batch["input_ids"].cpu()]
        arguments = transformers.TrainingArguments(
            str(tmp_path / execution),
            report_to=[],
            logging_steps=1,
            max_steps=3,
            disable_tqdm=True,
            save_strategy="no",
            **{**bexp.training_arguments(told, world_size=1), "bf16": True},
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        if execution == "graph":
            assert (loss_of(model).problem, loss_of(model).num_captures) == (None, 1)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
