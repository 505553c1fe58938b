"""What explorations of meshes answer, on simulated devices."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.dimensions.expert_modes import ExpertMode
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.meshes.knowledge import MeshKnowledge, mesh_candidates
from bexp.explorer.meshes.mesh import MeshPlan
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import Progress
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.recommendation import Role
from bexp.explorer.records.trial import TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from tests.explorer.explorations import answer_of
from tests.explorer.notes import notes_of
from tests.explorer.shapes import shapes
from tests.explorer.simulator import SimulatedDevice, report

MODEL = shapes(16, 2048, 8192, heads=16, vocab=32000, length=4096, name="plan-test", num_query_groups=8)


def request(**changes: Any) -> ExplorationRequest:
    values = {"model": MODEL, "num_devices": 32, "batch_size": 256}
    asked = {"tensor": "explore", "pipeline": [1, 2], "sharding": ["zero1", "zero3"]}
    return ExplorationRequest.model_validate({**values, "micro_batch_size": [1, 2, 4], "parallelism": asked, **changes})


def there(gib: float = 24.0, *, experts: bool = False) -> DeviceReport:
    return report(memory_gib=gib, experts=experts, num_devices=32)


def run(asked: ExplorationRequest, gib: float = 24.0) -> list[Progress]:
    return list(explore(asked, there(gib), SimulatedDevice(asked)))


@pytest.fixture(scope="module")
def steps() -> list[Progress]:
    return run(request())


def test_meshes_of_which_a_trainer_can_be_told_nothing_say_so() -> None:
    kernel = request(trainer="torchtitan", attention_backends=["flash"], parallelism={"tensor": 2})
    with pytest.raises(EmptySpaceError, match="torchtitan cannot express the attention kernel 'flash'"):
        mesh_candidates(kernel, there())


def test_the_answer_is_nearly_the_best_that_full_knowledge_gives(steps: list[Progress]) -> None:
    asked = request()
    space, simulated = MeshKnowledge(asked, there()), SimulatedDevice(asked, noise=0.0)
    blocks = {c for one in space.candidates for c in space.composer.components(one)}
    task = TrialTask(
        number=0,
        kind="components",
        model=asked.model,
        candidate=space.candidates[0].candidate,
        components=(*space.transfers, *blocks),
        timeout_seconds=1,
    )
    space.learn(simulated(task).components)
    found = [space.step(one) for one in space.candidates]
    fits = [step for step in found if space.required_bytes(step) <= space.limit_bytes]
    fastest = sorted(zip(space.candidates, found, strict=True), key=lambda pair: -pair[1].tokens_per_second)[:24]
    exact = [space.step(one, simulate=True) for one, step in fastest if step in fits]
    best = max(step.tokens_per_second for step in exact if space.required_bytes(step) <= space.limit_bytes)
    answer = answer_of(steps)
    assert answer.recommendation is not None
    assert answer.recommendation.tokens_per_second > 0.97 * best
    assert sum(step.trial is not None for step in steps) < 30


def skewed(expert: Any) -> list[Progress]:
    """Meshes of 8 devices whose routing follows Zipf's law."""
    experts = {"num_experts": 32, "top_k": 4, "expert_ffn_hidden_size": 1024}
    asked = request(
        model={**MODEL, "num_layers": 4, "moe": experts},
        num_devices=8,
        routing={"kind": "zipf"},
        parallelism={"expert": expert, "expert_mode": "explore", "sharding": "zero1"},
    )
    return list(explore(asked, there(48.0, experts=True), SimulatedDevice(asked)))


def test_skewed_routing_is_answered_with_shadowed_experts_and_by_how_much() -> None:
    steps = skewed(8)
    space, answer = next(step.space for step in steps if step.space is not None), steps[-1].answer
    assert space["expert_mode"] == ["overlapped", "plain", "shadowed"]
    assert answer is not None
    assert answer.recommendation is not None
    best, plan = answer.recommendation, answer.recommendation.plan
    assert isinstance(plan, MeshPlan)
    assert plan.base_mesh.expert_mode is ExpertMode.PLAIN
    modes = [(one, one.mesh) for one in best.alternatives_of(Role.EXPERT_MODE)]
    found = {mesh.expert_mode: one for one, mesh in modes if mesh is not None}
    assert plan.mesh.expert_mode is ExpertMode.SHADOWED
    assert set(found) == {ExpertMode.PLAIN, ExpertMode.OVERLAPPED}
    assert found[ExpertMode.PLAIN].ratio > found[ExpertMode.OVERLAPPED].ratio > 1.1
    for one, _ in modes:
        assert one.ratio == pytest.approx(best.tokens_per_second / one.tokens_per_second)
    assert plan.plain is not None
    assert plan.plain.fits
    assert plan.plain.mesh.expert_mode is ExpertMode.PLAIN
    assert any("this expert mode" in note for note in notes_of(best))


def test_data_parallel_experts_are_compared_with_every_mode() -> None:
    answer = answer_of(skewed([1, 8]))
    assert answer.recommendation is not None
    plan = answer.recommendation.plan
    assert isinstance(plan, MeshPlan)
    assert (plan.mesh.expert, plan.plain) == (1, None)
    modes = [one.mesh for one in answer.recommendation.alternatives_of(Role.EXPERT_MODE)]
    assert {mesh.expert for mesh in modes if mesh is not None} == {8}
    assert ExpertMode.SHADOWED in {mesh.expert_mode for mesh in modes if mesh is not None}


def test_a_model_too_large_for_any_mesh_is_told_so() -> None:
    answer = answer_of(run(request(), gib=1.0))
    assert answer.recommendation is None
    assert answer.variants[0].reason is not None
    assert "no mesh fits" in answer.variants[0].reason
    assert "No tensor, pipeline or expert parallelism" in answer.variants[0].reason
    assert not answer.variants[0].remedies


@pytest.mark.parametrize(
    ("changes", "gib", "remedies"),
    [
        ({}, 1.75, ["num_devices 64"]),
        ({"parallelism": {"tensor": 2}}, 7.0, ["sharding zero1", "tensor 4", "pipeline 2"]),
        (
            {"parallelism": {"tensor": 2}, "recompute": ["none"], "micro_batch_size": 4},
            3.5,
            ["recompute full and sharding zero3"],
        ),
    ],
)
def test_each_remedy_makes_a_mesh_fit(changes: dict[str, Any], gib: float, remedies: list[str]) -> None:
    asked = request(**changes)
    answer = answer_of(run(asked, gib=gib))
    (found,) = answer.variants
    assert [one.change[: len(text)] for one, text in zip(found.remedies, remedies, strict=True)] == remedies
    assert found.reason is not None
    assert f"It would fit with {found.remedies[0].change}" in found.reason
    for one in found.remedies:
        changed = ExplorationRequest.model_validate({**asked.model_dump(), **one.settings, "budget": {"max_trials": 1}})
        last = answer_of(run(changed, gib=gib))
        assert not last.variants[0].remedies, f"a mesh fits after {one.change}"


def test_a_block_that_fails_rules_out_its_meshes_alone() -> None:
    asked = request()

    class Failing(SimulatedDevice):
        def __call__(self, task: TrialTask) -> Measurement:
            failed = next((c for c in task.components if c.tensor_parallel_size == 1 and c.micro_batch_size > 1), None)
            if failed is None:
                return super().__call__(task)
            reason = "CUDA out of memory"
            return Measurement(
                candidate=task.candidate, outcome=Outcome.OUT_OF_MEMORY, reason=reason, failed_component=failed
            )

    steps = list(explore(asked, there(), Failing(asked)))
    answer = answer_of(steps)
    assert answer.recommendation is not None
    assert isinstance(answer.recommendation.plan, MeshPlan)
    mesh, candidate = answer.recommendation.plan.mesh, answer.recommendation.candidate
    assert mesh.tensor > 1 or candidate.micro_batch_size == 1


def test_the_budget_ends_a_search_of_meshes() -> None:
    steps = run(request(budget={"max_trials": 2}))
    assert sum(step.trial is not None for step in steps) <= 4
    assert steps[-1].answer is not None
    assert steps[-1].answer.recommendation is not None
