"""Packed texts on tiny models: they train as they do one by one, or the leak is named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.request_texts import text_batches
from bexp.explorer.cost.text_batches import TextBatch
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.profiler.trials.component import measure_component
from bexp.workers.profiler.trials.whole_model import run_whole_model
from bexp.workers.targets.transformers import packing
from bexp.workers.targets.transformers.batch import arranged, make_batch
from bexp.workers.targets.transformers.builder import PartsBuilder
from bexp.workers.targets.transformers.config import quiet_library
from bexp.workers.targets.transformers.kinds import find_layers
from bexp.workers.targets.transformers.model import BuildSettings, build_model
from bexp.workers.targets.transformers.packing import find_leak, packed_texts
from bexp.workers.targets.transformers.parts_comparison import PartsComparison
from bexp.workers.targets.transformers.probe import SettingsProbe
from bexp.workers.targets.transformers.resolved import ResolvedModel, resolve
from bexp.workers.targets.transformers.target import TransformersTarget
from tests.workers.profiler.trials.test_optimizer import OneSecond
from tests.workers.targets.transformers.targets import (
    CPU,
    HARDWARE,
    LLAMA,
    QWEN_MOE,
    candidate,
    open_target,
    parts_of,
    request_for,
)

pytest.importorskip("transformers")

FLOAT32 = BuildSettings(dtype=torch.float32)
LENGTHS = {"3": 40, "7": 20, "16": 5, "40": 2}


def model_of(model_type: str) -> ResolvedModel:
    return resolve({"model_type": model_type}, 64)


@pytest.mark.parametrize(("model_type", "flattened"), [("llama", True), ("gpt2", False), ("gemma3_text", True)])
def test_logits_loss_and_gradients_of_packed_texts_are_those_of_each_alone(model_type: str, *, flattened: bool) -> None:
    tiny = model_of(model_type).tiny
    model: Any = build_model(tiny, FLOAT32, CPU).eval()
    texts = packed_texts(tiny.seq_length, flattened=flattened)
    batch = make_batch(tiny.config, texts, CPU)
    packed = model(**batch, use_cache=False)
    packed.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    tokens, logits, losses, counts = batch["input_ids"].flatten(), [], [], []
    at = 0
    for row in texts.rows:
        for length in row:
            ids = tokens[at : at + length][None]
            alone = model(input_ids=ids, labels=ids, use_cache=False)
            logits.append((at, alone.logits[0]))
            losses.append(alone.loss)
            counts.append(length - 1)
            at += length
        at += texts.width - sum(row)  # padding has no label
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    mean.backward()
    flat = packed.logits.reshape(-1, packed.logits.shape[-1])
    for place, expected in logits:
        torch.testing.assert_close(flat[place : place + len(expected)], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed.loss, mean)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("model_type", ["gemma3_text", "deepseek_v3"])
def test_parts_of_a_model_on_packed_texts_add_up_to_the_whole(model_type: str) -> None:
    tiny = model_of(model_type).tiny
    model = build_model(tiny, FLOAT32, CPU)
    comparison = PartsComparison(tiny, FLOAT32, model, find_layers(model))
    comparison.followed_outputs = dict.fromkeys(comparison.kinds, (0,))
    with quiet_library():
        comparison.require_sum(packed_texts(tiny.seq_length, flattened=False))


@pytest.mark.parametrize(("model_type", "keeps_apart"), [("olmoe", True), ("mamba", False), ("gpt_oss", False)])
def test_a_model_that_mixes_packed_texts_is_found(model_type: str, *, keeps_apart: bool) -> None:
    resolved = model_of(model_type)
    attention = resolved.model.config._attn_implementation or "eager"
    for flattened in (False, True):
        found = find_leak(resolved.tiny, BuildSettings(), CPU, attention, flattened=flattened)
        assert (found is None) is keeps_apart
        assert found is None or "attention reaches across packed texts" in found


def test_an_attention_that_forgets_the_borders_of_texts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library makes the mask from the positions."""
    from transformers.models.llama import modeling_llama

    library: Any = modeling_llama
    made = library.create_causal_mask
    tiny = model_of("llama").tiny
    assert find_leak(tiny, BuildSettings(), CPU, "sdpa", flattened=False) is None
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **named: made(**named | {"position_ids": None}))
    assert "attention reaches across packed texts" in str(
        find_leak(tiny, BuildSettings(), CPU, "sdpa", flattened=False)
    )


def test_an_attention_that_cannot_be_compared_is_not_taken_for_one_that_keeps_texts_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(packing, "require_apart", no_room)
    found = find_leak(model_of("llama").tiny, BuildSettings(), CPU, "sdpa", flattened=False)
    assert found == "OutOfMemoryError: out of memory"


@pytest.mark.parametrize(
    "shortage", [MemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_shortage_of_memory_is_no_fault_of_a_class(shortage: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    def no_room(*_: Any, **__: Any) -> None:
        raise shortage

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", no_room)
    with pytest.raises(type(shortage), match=re.escape(str(shortage))):
        build_model(model_of("llama").tiny, BuildSettings(), CPU)


def test_a_model_that_mixes_packed_texts_is_refused_with_the_reason() -> None:
    bloom = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 160}
    with pytest.raises(UnsupportedTrialError, match="bloom cannot train on packed texts: eager: attention reaches"):
        open_target(bloom, lengths=LENGTHS, batching="packed").report(HARDWARE)
    assert open_target(bloom, lengths=LENGTHS).report(HARDWARE).attention_backends[0].usable


def test_flash_attention_and_trl_get_packed_rows_as_one() -> None:
    texts = TextBatch(((10, 5), (16,)), 16, is_packed=True)
    for attention, flattens, is_one in (
        ("sdpa", False, False),
        ("sdpa", True, True),
        ("flash_attention_2", False, True),
    ):
        batch = make_batch(model_of("llama").config.config, arranged(texts, attention, flattens=flattens), CPU)
        assert batch["input_ids"].shape == ((1, 32) if is_one else (2, 16))
        assert "attention_mask" not in batch
        positions = batch["position_ids"].flatten()
        assert positions.tolist() == [*range(10), *range(5), 0, *range(16)]
        assert batch["labels"].flatten()[positions == 0].eq(-100).all(), "the first token of a text has no past"
        assert batch["labels"].flatten()[15] == -100


def test_padded_rows_end_where_their_texts_end() -> None:
    batch = make_batch(model_of("llama").config.config, TextBatch(((3,), (5,)), 5), CPU)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].ge(0).equal(batch["attention_mask"].bool())


@pytest.mark.parametrize(
    ("config", "batching"),
    [(LLAMA, "padded"), (LLAMA, "packed"), (LLAMA, "token_budget"), (QWEN_MOE, "token_budget")],
    ids=["padded", "packed", "token budget", "token budget with experts"],
)
def test_components_and_whole_models_are_measured_at_the_lengths_of_an_epoch(
    config: dict[str, Any], batching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for(config, lengths=LENGTHS, batching=batching)
    instruments = Instruments(CPU)
    instruments.timer = OneSecond()
    target = TransformersTarget(request, instruments)
    parts = parts_of(target)
    batches = text_batches(request, 4)
    assert batches is not None
    asked: list[TextBatch | int] = []
    taken = PartsBuilder.batch

    def batch(builder: PartsBuilder, texts: TextBatch | int) -> Any:
        asked.append(texts)
        return taken(builder, texts)

    monkeypatch.setattr(PartsBuilder, "batch", batch)
    layer = Component(kind=ComponentKind.LAYER, part=parts.layers[0], micro_batch_size=4, backend="sdpa")
    shell = Component(kind=ComponentKind.SHELL, micro_batch_size=4, backend="library")
    for component in (layer, shell):
        found = measure_component(instruments, target, parts, component, request, PhaseClock())
        assert tuple(asked[-len(batches.measured) :]) == batches.measured
        if not batches.varies:
            assert found.batches is not None
            continue
        assert found.batches is not None
        assert [one.positions for one in found.batches] == [one.positions for one in batches.measured]
        saved = [one.saved_bytes for one in found.batches]
        assert found.saved_bytes == max(saved)
        if batching == "padded":
            assert saved[-1] > 1.5 * min(saved), "the longest has the most tokens"
        share = batches.expect([1.0] * len(found.batches))[0]  # of a token budget's micro-batch; else 1
        assert found.device_seconds == pytest.approx(share), "each of them takes a second"
    whole = run_whole_model(instruments, target, parts, candidate(4), request, PhaseClock())
    assert whole.micro_step_seconds > 0
    with target.training_run(candidate(4), parts, request) as run:
        widths = [batch["input_ids"].shape[1] for batch in run._batches]
    assert widths == [one.width for one in (batches.measured[0], *batches.measured)]


def test_a_model_of_experts_gets_hidden_states_of_its_own_depth_at_every_width() -> None:
    config = {**LLAMA, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2}
    resolved = resolve(config, 16)
    builder = resolved.builder(CPU)
    full = builder.layer(resolved.kinds[0], 2).hidden
    short = builder.layer(resolved.kinds[0], TextBatch(((9,), (4,)), 9)).hidden
    assert torch.equal(short, full[:, :9])
    packed = TextBatch(((9, 7), (4,)), 16, is_packed=True, is_flattened=True)
    assert torch.equal(builder.layer(resolved.kinds[0], packed).hidden, full.reshape(1, 32, -1))


def test_back_ends_are_tried_on_packed_texts_that_need_a_mask() -> None:
    fields: dict[str, Any] = {"lengths": [[16, 1], [5, 40]], "batching": "packed"}
    request, target = request_for(**fields), open_target(**fields)
    batches = text_batches(request, 1)
    assert batches is not None
    assert batches.longest.is_whole, "one text, which has the most pairs"
    tried = SettingsProbe(target._resolved, target._parts(), request)._texts
    assert [len(row) for row in tried.rows] == [3]
