"""Sentences and keys that people and databases hold on to, as recorded."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.meshes.relaxations import find_mesh_relaxations
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.records.measurement import Outcome, SizeResult
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.alternatives import largest_untiled
from bexp.explorer.search.component_subjects import component_subjects
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import enumerate_candidates
from bexp.explorer.search.relaxations import explain_without_fit
from bexp.explorer.search.step_exploration import StepDescription, _report, _request, search_step
from tests.explorer.cost import described
from tests.explorer.explorations import MODEL as EXPERTS
from tests.explorer.explorations import answer_of
from tests.explorer.search.small import MODEL, small_state
from tests.explorer.search.test_component_subjects import CONFIG
from tests.explorer.search.test_component_subjects import MODEL as PLACED
from tests.explorer.simulator import SimulatedDevice, report
from tests.recordings import check_recorded

TEXTS = Path(__file__).parent / "texts"
GIB = 1 << 30


def asked(**changes: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate(
        {"model": MODEL, "batch_size": 512, "micro_batch_size": "explore", **changes}
    )


SHORT_OF_MEMORY: dict[str, dict[str, Any]] = {
    "activations": {"model": {**MODEL, "seq_length": 8192}, "memory_limit_gib": 0.2, "micro_batch_size": [64]},
    "state": {"model": EXPERTS, "memory_limit_gib": 3},
    "sharded": {"model": EXPERTS, "memory_limit_gib": 3, "num_devices": 4, "training": {"sharding": "zero1"}},
    "policies": {"model": EXPERTS, "memory_limit_gib": 10, "recompute": ["none"], "micro_batch_size": [16, 32]},
    "untiled": {"model": EXPERTS, "memory_limit_gib": 9, "bta": {"enable": False}, "micro_batch_size": [8]},
    "full loss": {
        "model": {**MODEL, "vocab_size": 128_000, "seq_length": 16_384},
        "memory_limit_gib": 12,
        "micro_batch_size": [1],
        "training": {"loss": {"kind": "full"}},
    },
    "back ends": {"model": EXPERTS, "memory_limit_gib": 9.7, "attention_backends": ["math"], "micro_batch_size": [1]},
    "two devices": {"model": EXPERTS, "memory_limit_gib": 6, "num_devices": 2, "micro_batch_size": [4]},
    "hopeless": {"model": {**EXPERTS, "num_layers": 512}, "memory_limit_gib": 1},
    "evaluation": {"model": EXPERTS, "memory_limit_gib": 1, "mode": "eval"},
}


def test_remedies_are_as_recorded() -> None:
    found = []
    for name, changes in SHORT_OF_MEMORY.items():
        req = asked(**changes)
        reason, remedies = explain_without_fit(req, report(memory_gib=40), req.shapes)
        found.append([name, reason, [remedy.model_dump(mode="json") for remedy in remedies]])
    check_recorded(TEXTS / "remedies.json", found)


MESHES: dict[str, dict[str, Any]] = {
    "devices": {"num_devices": 8, "parallelism": {"tensor": [1, 2]}},
    "policies": {"num_devices": 8, "recompute": ["none"], "micro_batch_size": [8], "parallelism": {"tensor": [2]}},
    "sharding": {"num_devices": 8, "parallelism": {"tensor": [2], "sharding": "none"}},
    "experts": {"num_devices": 8, "model": EXPERTS, "parallelism": {"expert": [2], "sharding": "none"}},
}


@pytest.mark.parametrize("gib", [1.5, 4.0])
def test_remedies_of_meshes_are_as_recorded(gib: float) -> None:
    large = {**MODEL, "num_layers": 24, "hidden_size": 1024, "ffn_hidden_size": 4096}
    found = []
    for name, changes in MESHES.items():
        req = asked(**{"model": large, "batch_size": 64, **changes})
        remedies = find_mesh_relaxations(req, report(memory_gib=gib))
        found.append([name, [remedy.model_dump(mode="json") for remedy in remedies]])
    check_recorded(TEXTS / f"mesh-remedies-{gib}.json", found)


REFUSED: dict[str, dict[str, Any]] = {
    "unknown attention": {"attention_backends": ["flahs"]},
    "unusable attention": {"attention_backends": ["math"]},
    "flash excluded": {"attention_backends": ["flash"], "flash_attention": False},
    "unknown experts": {"model": EXPERTS, "expert_backends": ["grouped"]},
    "experts of other devices": {"model": EXPERTS, "expert_backends": ["fused"]},
    "too few devices": {"num_devices": 8, "batch_size": 64, "context_parallel": {"sizes": [8]}},
    "no ring": {
        "num_devices": 2,
        "batch_size": 64,
        "attention_backends": ["efficient"],
        "context_parallel": {"sizes": [2]},
    },
    "unknown kernels": {"target": "transformers", "kernels": ["liger"]},
}


def test_refusals_of_a_space_are_as_recorded() -> None:
    rep = report(num_devices=2)
    broken = BackendSupport(name="math", usable=False, reason="it needs another device")
    others = [each for each in rep.attention_backends if each.name != broken.name]
    rep = rep.model_copy(update={"attention_backends": (*others, broken)})
    found: list[Any] = []
    for name, changes in REFUSED.items():
        try:
            req = asked(**changes)
            space = enumerate_candidates(req, rep, req.shapes)
        except (EmptySpaceError, ValueError) as error:
            found.append([name, str(error).partition(" [type=")[0]])
        else:
            found.append([name, space.summarize()])
    of_parts: dict[str, Any] = {"hf_config": CONFIG, "hf_seq_length": 32, "target": "transformers"}
    req, parts = ExplorationRequest.model_validate({**of_parts, "kernels": ["liger"]}), described.device()
    assert parts.parts is not None
    for kernels in ((), (BackendSupport(name="liger", usable=False, reason="it is not installed"),)):
        with pytest.raises(EmptySpaceError) as refused:
            enumerate_candidates(req, parts.model_copy(update={"choices": {"kernels": kernels}}), parts.parts)
        found.append(["kernels", str(refused.value)])
    losses = (BackendSupport(name="library", usable=False, reason="it differs"),)
    req = ExplorationRequest.model_validate({**of_parts, "losses": ["library"]})
    with pytest.raises(EmptySpaceError) as refused:
        enumerate_candidates(req, parts.model_copy(update={"choices": {"loss": losses}}), parts.parts)
    found.append(["losses", str(refused.value)])
    check_recorded(TEXTS / "refusals.json", found)


SUBJECTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "evaluation": {"mode": "eval"},
    "sharded": {"num_devices": 4, "training": {"sharding": "zero3"}},
    "compiled": {"execution": "compile"},
    "skewed": {"routing": {"kind": "zipf"}},
}


def test_the_subjects_of_components_are_as_recorded() -> None:
    """They are keys of stored components: another key for the same component measures all of it again."""
    found = []
    for name, changes in SUBJECTS.items():
        req = ExplorationRequest.model_validate({"model": PLACED, **changes})
        found.append([name, _subjects(req, report())])
    configs: dict[str, Any] = {"layers": {}, "numbered": {"n_layer": 4}, "named": {"transformers_version": "5"}}
    for name, config in configs.items():
        req = ExplorationRequest.model_validate(
            {"hf_config": {**CONFIG, **config}, "hf_seq_length": 32, "target": "transformers"}
        )
        found.append([f"parts, {name}", _subjects(req, described.device())])
    check_recorded(TEXTS / "subjects.json", found)


def _subjects(req: ExplorationRequest, rep: Any) -> dict[str, str]:
    return {f"{kind.value}/{part}": subject for (kind, part), subject in component_subjects(req, rep).items()}


class Step:
    """A step whose seconds are affine in its size; some sizes end otherwise."""

    def __init__(self, fails: dict[int, Outcome], noise: float) -> None:
        self.asked: list[int] = []
        self._fails = fails
        self._noise = noise
        self._random = random.Random(3)

    def measure(self, size: int) -> SizeResult:
        self.asked.append(size)
        if size in self._fails:
            return SizeResult(size, self._fails[size], reason="as drawn")
        seconds = (0.008 + 0.002 * size**1.05) * (1 + 0.02 * (size == 48))
        timed = tuple(seconds * (1 + self._random.gauss(0, self._noise)) for _ in range(5))
        return SizeResult(size, Outcome.OK, seconds=timed, peak_bytes=(9 + 2 * size) * GIB)


STEPS: dict[str, tuple[dict[int, Outcome], dict[str, Any]]] = {
    "memory": ({}, {}),
    "uncounted": ({48: Outcome.OUT_OF_MEMORY, 64: Outcome.OUT_OF_MEMORY}, {"memory_bytes": 0}),
    "crashes": ({16: Outcome.CRASHED, 24: Outcome.TIMED_OUT}, {}),
    "held": ({}, {"held_bytes": 60 * GIB}),
    "one": (dict.fromkeys((2, 4, 8, 16, 24, 32, 48, 64), Outcome.OUT_OF_MEMORY), {"memory_bytes": 0}),
    "cpu": ({}, {"device_kind": "cpu", "gradient_bytes": 0}),
    "accumulated": ({}, {"sequences": 96, "optimizer_seconds": 0.05}),
    "context": ({}, {"context_bytes": 12 * GIB}),
    "stopped": ({}, {"sizes": (1, 2)}),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_search_of_a_step_is_as_recorded(name: str) -> None:
    fails, changes = STEPS[name]
    step = Step(fails, noise=0.005)
    description = StepDescription(
        device_kind="cuda",
        device_name="a device",
        memory_bytes=80 * GIB,
        held_bytes=8 * GIB,
        gradient_bytes=GIB,
        num_parameters=GIB // 4,
        torch_version="2.11",
        sizes=(1, 2, 4, 8, 16, 24, 32, 48, 64),
        max_seconds=300.0,
        first=step.measure(1),
    )
    stops_after = 3 if name == "stopped" else 1000

    def ask(size: int) -> SizeResult | None:
        return step.measure(size) if len(step.asked) < stops_after else None

    found = search_step(replace(description, **changes), ask)
    check_recorded(TEXTS / f"step-{name}.json", [step.asked, asdict(found)])


def test_a_step_is_explored_like_any_target_and_defaults_count_nothing() -> None:
    first = SizeResult(2, Outcome.OK, seconds=(0.02, 0.021), peak_bytes=5 * GIB)
    plain = StepDescription("cuda", "a device", 1000, "2.11", (1, 2, 300), 10.0, first)
    counted = replace(plain, sizes=(1, 2), memory_bytes=8 * GIB, held_bytes=GIB, gradient_bytes=GIB // 2, sequences=6)
    with pytest.raises(ValueError, match="it takes at most 64 sizes, up to 256"):
        search_step(plain, lambda size: None)
    found = [
        [asdict(each) | {"first": None}, _request(each).model_dump(mode="json"), _report(each).model_dump(mode="json")]
        for each in (replace(plain, sizes=(1, 2)), counted)
    ]
    check_recorded(TEXTS / "step-as-a-target.json", found)


def test_the_answer_says_what_it_is_compared_with() -> None:
    req = asked(micro_batch_size=[1, 2, 4], attention_backends=["cudnn", "flash"], batch_size=10)
    steps = list(explore(req, report(memory_gib=40), SimulatedDevice(req, noise=0.01), clock=lambda: 0.0))
    answer = answer_of(steps)
    check_recorded(TEXTS / "uneven-batch.json", [answer.model_dump(mode="json")])
    assert largest_untiled(small_state(), among=[]) is None
