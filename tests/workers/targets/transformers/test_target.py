"""What the target holds between its parts and the whole model."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
from torch import Tensor

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.records.measurement import Outcome
from bexp.explorer.search.legal_space import enumerate_candidates
from bexp.measure import host_limits
from bexp.workers.instruments.failures import TrialFailedError, UnsupportedTrialError
from bexp.workers.targets.transformers.passes import LayerPasses
from bexp.workers.targets.transformers.self_check import SelfCheck
from tests.bexp.kernels.references import assert_same_values
from tests.bexp.transformers import fake_liger
from tests.workers.targets.transformers.targets import HARDWARE, candidate, open_target, opened, parts_of, request_for

pytest.importorskip("transformers")


def test_memory_is_settled_after_the_parts_and_before_there_is_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    target, parts, request = opened()
    weight = weakref.ref(next(target._parts().skeleton.model.parameters()))
    assert target.rest() > 0
    found: list[tuple[bool, dict[str, Any]]] = []
    monkeypatch.setattr(target._instruments, "settle", lambda **asked: found.append((weight() is None, asked)))
    with target.training_run(candidate(), parts, request):
        assert found == [(True, {"release": True})]
        assert target.rest() == 0


def test_parts_with_a_policy_that_is_named_are_those_of_the_whole_model() -> None:
    names = ("none", "layers_2", "groups_2", "offload")
    request, target = request_for(recompute=names), open_target(recompute=names)
    report = target.report(HARDWARE)
    parts = report.parts
    assert parts is not None
    assert parts.unavailable["offload"] == "the host's memory is the device's own"
    parts = parts.model_copy(update={"policies": (*parts.policies, "offload")})  # as on a GPU
    space = enumerate_candidates(request, report, parts).candidates
    assert {one.recompute.value for one in space} == set(names)
    ran: dict[str, list[Tensor]] = {}
    for name in names:
        chosen = next(one for one in space if one.micro_batch_size == 2 and one.recompute == name)
        for component in Decomposer(parts, training=True)(chosen).components:
            if component.kind is ComponentKind.OPTIMIZER:
                continue
            with target.component(component, parts, request) as passes:
                for prepare, run in (
                    (passes.prepare_forward, passes.forward),
                    (passes.prepare_backward, passes.backward),
                ):
                    prepare()
                    run()
        with target.training_run(chosen, parts, request) as whole:
            whole.begin()
            whole.step()
            ran[name] = [parameter.detach().clone() for parameter in whole._model.parameters()]
    for name in names[1:]:
        assert_same_values(ran[name], ran["none"])


def test_a_layer_is_refused_whose_activations_the_host_cannot_hold_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    target, parts, request = opened()
    component = Component(
        kind=ComponentKind.LAYER, part=parts.layers[0], micro_batch_size=2, backend="sdpa", recompute="offload"
    )
    free = 1 << 30
    monkeypatch.setattr(host_limits, "available_bytes", lambda: free)
    with target.component(component, parts, request) as passes:
        passes.prepare_forward()
        passes.forward()
        assert isinstance(passes, LayerPasses)
        taken = passes.host_bytes
        assert taken > 2 * 16 * 64 * 2 * 4, "more than four tensors as wide as the hidden states"
    free = 3 * taken
    with target.component(component, parts, request):
        pass
    free -= 1
    refused = pytest.raises(TrialFailedError, match=r"the activations need .* of the host's memory")
    with refused as failed, target.component(component, parts, request):
        pass
    assert failed.value.outcome is Outcome.OUT_OF_MEMORY


def test_a_number_beyond_the_layers_of_a_config_is_refused_with_the_nearest() -> None:
    report = open_target().report(HARDWARE)
    assert report.parts is not None
    with pytest.raises(EmptySpaceError, match="has 3 layers; the nearest policy is 'full'"):
        enumerate_candidates(request_for(recompute=["layers_4"]), report, report.parts)


def test_the_loss_of_routers_is_in_the_whole_model_and_not_in_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "qwen2_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    config |= {"num_experts": 5, "num_experts_per_tok": 3, "vocab_size": 163, "output_router_logits": True}
    target = open_target(config)
    losses: list[Any] = []
    modeling = sys.modules[target._resolved.config.model_class.__module__]
    measured = modeling.load_balancing_loss_func

    def noted(logits: Any, *others: Any) -> Any:
        losses.append(logits)
        return measured(logits, *others)

    monkeypatch.setattr(modeling, "load_balancing_loss_func", noted)
    parts = parts_of(target)
    assert not losses
    with target.training_run(candidate(2, expert_backend="eager"), parts, request_for(config)) as whole:
        whole.begin()
        whole.step()
    assert {len(logits) for logits in losses} == {2}, "the routers of both layers"


def test_a_type_without_parts_is_refused_with_the_way_to_measure_it_whole() -> None:
    target = open_target()
    target._resolved.__dict__["check"] = SelfCheck(failures={"layers": "layer 0 is called 6 times"})
    with pytest.raises(UnsupportedTrialError, match=r"is called 6 times.*hugging_face\.py"):
        target.report(HARDWARE)
    target._resolved.__dict__.pop("check")  # later jobs share the resolved model


@pytest.mark.parametrize("routing", [{"kind": "zipf"}, {"kind": "shares", "shares": [3, 1]}])
def test_a_routing_that_the_models_own_routers_would_not_follow_is_refused(routing: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedTrialError, match="the model's own routers decide"):
        open_target(routing=routing)


def test_a_whole_model_leaves_the_library_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every later measurement would have the rotation of liger's kernels."""
    fake_liger.install(monkeypatch)
    target, parts, request = opened()
    library = vars(sys.modules["transformers.models.llama.modeling_llama"])
    before = library["apply_rotary_pos_emb"]
    with target.training_run(candidate(kernels="liger"), parts, request) as whole:
        assert library["apply_rotary_pos_emb"] is not before
        whole.begin()
    assert library["apply_rotary_pos_emb"] is before
    with pytest.raises(RuntimeError, match="lost"), target.training_run(candidate(kernels="liger"), parts, request):
        raise RuntimeError("lost")
    assert library["apply_rotary_pos_emb"] is before
