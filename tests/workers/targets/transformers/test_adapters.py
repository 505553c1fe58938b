"""Adapters of peft on frozen weights: what is measured of them, and what is refused."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

import bexp
from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.hardware import NAME_IT
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.search.event_messages import adapted_experts_event
from bexp.transformers import experts
from bexp.workers.instruments.failures import UnsupportedTrialError, classify
from bexp.workers.targets.transformers.probe import SettingsProbe
from bexp.workers.targets.transformers.target import TransformersTarget
from tests.bexp.transformers import models
from tests.workers.targets.transformers.targets import (
    HARDWARE,
    LLAMA,
    QWEN_MOE,
    changed_by_a_step,
    open_target,
    opened,
    parts_of,
    request_for,
)

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
    return parts_of(target)


def test_only_the_adapters_count_as_trained(parts: ModelParts) -> None:
    (kind,) = parts.kinds
    adapters = 4 * (64 + 64) + 4 * (64 + 32)
    assert kind.trainable_bytes == 4 * adapters  # float32
    assert parts.trainable_bytes == 3 * 4 * adapters
    assert parts.shell.trainable_bytes == 0
    assert kind.parameter_bytes == 2 * (kind.num_parameters - adapters) + 4 * adapters
    assert (parts.tiles, "full" in parts.policies) == (True, True)


ATTENTION = {"q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (64, 64)}
DENSE = {"gate_proj": (64, 96), "up_proj": (64, 96), "down_proj": (96, 64)}


@pytest.mark.parametrize(
    ("config", "lora", "shapes"),
    [
        (QWEN_MOE, {}, ATTENTION),
        (LLAMA, {}, ATTENTION | DENSE),
        (LLAMA, {"use_dora": True}, ATTENTION | DENSE),
        (QWEN_MOE, {"target_parameters": ["experts.down_proj"]}, ATTENTION | {"experts": (4 * 64, 4 * 32)}),
    ],
)
def test_linear_modules_are_those_of_a_list_by_class(
    config: dict[str, Any], lora: dict[str, Any], shapes: dict[str, tuple[int, int]]
) -> None:
    """Experts in one tensor, their router and the output layer have no adapters unless they are named."""
    pytest.importorskip("peft")
    asked = {"r": 4, "target_modules": "linear-modules", **lora}
    found = parts_of(open_target(config, training={"lora": asked}))
    magnitudes = {name: outputs if "use_dora" in lora else 0 for name, (_, outputs) in shapes.items()}
    expected = {name: len(found.layers) * (4 * sum(sides) + magnitudes[name]) for name, sides in shapes.items()}
    assert found.adapted == expected
    assert sum(expected.values()) * 4 == found.trainable_bytes  # float32


def test_a_model_without_linear_layers_needs_names() -> None:
    pytest.importorskip("peft")
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 160}
    lora: dict[str, Any] = {"r": 4, "target_modules": "linear-modules"}
    with pytest.raises(UnsupportedTrialError, match=r"has no linear layers: name training\.lora\.target_modules"):
        open_target(config, training={"lora": lora}).report(HARDWARE)
    found = parts_of(open_target(config, training={"lora": lora | {"target_modules": ["c_attn"]}}))
    assert found.adapted == {"c_attn": 2 * 4 * (64 + 192)}


def test_parts_and_whole_give_gradients_to_the_adapters_alone(target: TransformersTarget, parts: ModelParts) -> None:
    request = request_for(training={"lora": LORA})
    for component in Decomposer(parts, training=True)(CANDIDATE).components[:2]:
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
        changed = changed_by_a_step(run)
        assert len(changed) == 12
        assert all("lora" in name for name in changed)
        assert all(changed.values()), "recomputed layers too"


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
    settings = bexp.Settings(attention="sdpa:math", recompute=recompute, bta_tile=2, loss="chunked")
    report = bexp.apply(model, bexp.RecommendedSetup(settings, micro_batch_size=4))
    assert "loss: chunked" in report.applied.done
    models.assert_same(models.step(model, models.batch()), wanted)
    assert len(wanted.gradients) == 8
    assert bexp.restore(model)
    assert models.snapshot(model.get_base_model()) == before


ON_EXPERTS = {"r": 4, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def test_experts_in_one_tensor_get_adapters_that_are_trained() -> None:
    pytest.importorskip("peft")
    lora = {**ON_EXPERTS, "use_rslora": True}
    target, parts, request = opened(QWEN_MOE, training={"lora": lora})
    assert parts.trainable_bytes == 2 * 4 * 4 * 4 * ((64 + 2 * 32) + (32 + 64)), "for each layer, expert and rank"
    candidate = CANDIDATE.model_copy(update={"expert_backend": "grouped_mm"})
    with target.training_run(candidate, parts, request) as run:
        changed = changed_by_a_step(run)
        assert (len(changed), all(changed.values())) == (2 * 2 * 2, True)
        wrappers: list[Any] = [module for module in run._model.modules() if type(module).__name__ == "ParamWrapper"]
        scaled = {wrapper.scaling["default"] for wrapper in wrappers}
        assert scaled == {4 / 4**0.5}


def test_embeddings_and_head_are_trained_as_copies() -> None:
    pytest.importorskip("peft")
    lora = {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}
    target, parts, request = opened(training={"lora": lora})
    copies = 2 * 160 * 64 * 2
    assert parts.shell.trainable_bytes == copies
    assert parts.shell.parameter_bytes == 2 * copies + 2 * 64, "the frozen ones are still there"
    with target.training_run(CANDIDATE, parts, request) as run:
        changed = changed_by_a_step(run)
        (head,) = (name for name in changed if "lm_head.modules_to_save" in name)
        assert changed[head], "the loss is computed in chunks of the copy"


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"r": 4, "target_parameters": ["experts.nothing"]}, "training.lora.target_parameters"),
        (
            {"r": 4, "target_parameters": ["experts.down_proj", "experts.nothing"]},
            "training.lora.target_parameters: Qwen3MoeForCausalLM has no parameter called 'experts.nothing'",
        ),
        ({**LORA, "target_parameters": ["experts.nothing"]}, "no parameter called 'experts.nothing'"),
        ({**LORA, "modules_to_save": ["head"]}, "training.lora.modules_to_save: Qwen3MoeForCausalLM has no module"),
    ],
)
def test_a_parameter_or_module_that_matches_nothing_is_refused(lora: dict[str, Any], said: str) -> None:
    pytest.importorskip("peft")
    with pytest.raises(UnsupportedTrialError, match=re.escape(said)):
        open_target(QWEN_MOE, training={"lora": lora})


def test_the_librarys_experts_of_other_packages_are_tried_when_they_are_named() -> None:
    target = open_target(QWEN_MOE)
    for asked in ({}, {"expert_backends": ["grouped_mm", "sonicmoe", "deepgemm"]}):
        probe = SettingsProbe(target._resolved, target._parts(), request_for(QWEN_MOE, **asked))
        found = {support.name: support for support in probe.expert_supports()}
        assert found["grouped_mm"].usable
        for name in ("sonicmoe", "deepgemm"):
            assert found[name].only_when_named
            assert not found[name].usable
            assert (found[name].reason == NAME_IT) == (not asked), "without their packages they have another reason"


def test_our_kernels_serve_experts_with_adapters_where_they_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    fields = {"training": {"lora": ON_EXPERTS}}
    target = open_target(QWEN_MOE, **fields)
    probe = SettingsProbe(target._resolved, target._parts(), request_for(QWEN_MOE, **fields))
    assert probe._expert_support("bexp_fused").usable

    def forgets(x: Any, routes: Any, weights: Any, w_in: torch.Tensor, w_out: torch.Tensor, activation: Any) -> Any:
        return reference(x, routes, weights, w_in.detach(), w_out, activation)

    reference = experts._reference
    monkeypatch.setattr(experts, "_reference", forgets)
    left_out = probe._expert_support("bexp_fused")
    assert not left_out.usable
    assert left_out.reason is not None
    assert left_out.reason.startswith("with adapters on experts, gradient of mlp.experts.")
    event = adapted_experts_event([left_out])
    assert event is not None
    assert "Expert kernels are left out: 'bexp_fused' with adapters on experts" in event.message
    assert adapted_experts_event([left_out.model_copy(update={"reason": "it needs a GPU"})]) is None
    elsewhere = {"training": {"lora": LORA}}
    plain = open_target(QWEN_MOE, **elsewhere)
    probe = SettingsProbe(plain._resolved, plain._parts(), request_for(QWEN_MOE, **elsewhere))
    assert probe._expert_support("bexp_fused").usable
