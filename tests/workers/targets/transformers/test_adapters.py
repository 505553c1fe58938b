"""Adapters of peft on frozen weights: what is measured of them, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import bexp
from bexp.explorer.cost_model.part_costs import PartsDecomposer
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.spec.candidate import Candidate, Recompute
from bexp.explorer.spec.parts import ModelParts
from bexp.workers.instruments.failures import UnsupportedTrialError, classify
from bexp.workers.targets.transformers.target import TransformersTarget
from tests.bexp.transformers import models
from tests.workers.targets.transformers.targets import HARDWARE, LLAMA, open_target, request_for

pytest.importorskip("transformers")
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
CANDIDATE = Candidate(
    micro_batch_size=2, attention_backend="sdpa", num_query_groups=1, recompute=Recompute.FULL, loss="chunked"
)


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    pytest.importorskip("peft")
    return open_target(training={"lora": LORA})


@pytest.fixture(scope="module")
def parts(target: TransformersTarget) -> ModelParts:
    found = target.report(HARDWARE).parts
    assert found is not None
    return found


def test_only_the_adapters_count_as_trained(parts: ModelParts) -> None:
    (kind,) = parts.kinds
    adapters = 4 * (64 + 64) + 4 * (64 + 32)
    assert kind.trainable_bytes == 4 * adapters  # float32
    assert parts.trainable_bytes == 3 * 4 * adapters
    assert parts.shell.trainable_bytes == 0
    assert kind.parameter_bytes == 2 * (kind.num_parameters - adapters) + 4 * adapters
    assert (parts.tiles, "full" in parts.policies) == (True, True)


def test_parts_and_whole_model_give_gradients_to_the_adapters_alone(
    target: TransformersTarget, parts: ModelParts
) -> None:
    request = request_for(training={"lora": LORA})
    for component in PartsDecomposer(parts, training=True)(CANDIDATE).components[:2]:
        with target.component(component, parts, request) as passes:
            passes.prepare_forward()
            passes.forward()
            passes.prepare_backward()
            passes.backward()
            module: nn.Module = passes.module  # type: ignore[attr-defined]  # a block has one
            assert {"lora" in name for name, p in module.named_parameters() if p.grad is not None} <= {True}
    (stepped,) = target.optimizer_parts(CANDIDATE, parts, request)
    assert stepped.count == 3
    assert len(stepped.build().gradients) == 4
    with target.training_run(CANDIDATE, parts, request) as run:
        trained = [(name, p) for name, p in run._model.named_parameters() if p.requires_grad]
        before = [p.detach().clone() for _, p in trained]
        run.begin()
        run.step()
        assert len(trained) == 12
        assert all("lora" in name for name, _ in trained)
        assert all(not torch.equal(p, old) for (_, p), old in zip(trained, before, strict=True)), (
            "recomputed layers too"
        )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["q_proj", "no_such_module"], "LlamaForCausalLM has no module called 'no_such_module'"),
        (["nothing", "nowhere"], "'nothing', 'nowhere'"),
        (["mlp"], "'mlp'"),
    ],
)
def test_names_that_match_nothing_are_an_outcome_with_the_version(names: list[str], said: str) -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(UnsupportedTrialError) as refused:
        open_target(training={"lora": {"r": 4, "target_modules": names}})
    outcome, reason = classify(refused.value)
    assert outcome is Outcome.UNSUPPORTED
    assert reason is not None
    assert said in reason
    assert f"peft {peft.__version__}" in reason


def test_a_missing_library_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UnsupportedTrialError, match="pip install peft"):
        open_target(LLAMA, training={"lora": LORA})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize("recompute", ["none", "full", "activations"])
def test_a_model_with_adapters_is_set_up_and_computes_what_it_did(recompute: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(models.tiny("llama"), config)
    before = models.snapshot(model.get_base_model())
    wanted = models.step(model, models.batch())
    settings = {"attention": "sdpa:math", "recompute": recompute, "bta_tile": 2, "loss": "chunked"}
    report = bexp.apply(model, {"candidate": {"micro_batch_size": 4}, "settings": settings})
    assert "loss: chunked" in report.applied.done
    models.assert_same(models.step(model, models.batch()), wanted)
    assert len(wanted.gradients) == 8
    assert bexp.restore(model)
    assert models.snapshot(model.get_base_model()) == before
