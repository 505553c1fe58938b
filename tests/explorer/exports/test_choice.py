"""Which candidate a trainer is told."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.choice import Choice, choose
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.exports.export import build_settings, export
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.recommendation import Role
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.search.alternatives import expected_tokens_per_second
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.legal_space import explored_models, expressible, prune_space
from bexp.explorer.search.restored import restore_knowledge
from bexp.explorer.trainers.document import ExportError, TrainerSettings
from bexp.explorer.trainers.registry import FORMATS, TRAINERS, TrainerName, UnknownFormatError
from tests.explorer.alternatives import other_of
from tests.explorer.exports.samples import (
    GIB,
    LENGTHS,
    PARTS,
    candidate,
    exploration,
    offered,
    own_exploration,
    with_parts,
)
from tests.explorer.exports.simulated import LOGIT_BYTES, NUM_PARAMETERS, Simulated, simulated

MASTER_BYTES = NUM_PARAMETERS * (4 + 2 * (4 - 2))
"""Float32 master weights, and moments in float32 where they were in bfloat16."""


def plan(answer: ExportSource, name: str = "transformers") -> TrainerSettings:
    return build_settings(FORMATS[name].trainer, name, answer)


def chosen(found: Simulated, trainer: str) -> Choice:
    return choose(TRAINERS[trainer], found.source, found.request, found.known)


@pytest.mark.parametrize("losses", [["library", "chunked"], ["chunked"]])
def test_the_trainer_that_was_explored_for_gets_the_answers_own_candidate(losses: list[str]) -> None:
    found = simulated(22, losses=losses)
    own = other_of(found.known, Role.DIVIDING)
    choice = chosen(found, "bexp")
    assert (choice.candidate, choice.grad_accum_steps) == (own.candidate, own.grad_accum_steps)
    assert (choice.is_own, choice.confidence, choice.loss) == (True, own.confidence, 0.0)
    for name in ("transformers", "lightning", "megatron"):
        asked: dict[str, Any] = {"losses": ["library"], "trainer": name}
        explored = simulated(22, **asked)
        answer = other_of(explored.known, Role.DIVIDING)
        choice = chosen(explored, name)
        assert (choice.candidate, choice.is_own, choice.missing) == (answer.candidate, True, {})
        header = "\n".join(plan(explored.source, name).header)
        assert "in place of" not in header and "lost" not in header


def test_sharded_master_weights_take_a_share_of_each_device() -> None:
    sharded: dict[str, Any] = {"num_devices": 8, "batch_size": 768, "training": {"sharding": "zero2"}}
    found = simulated(17.5, losses=["library"], attention_backends=["sdpa"], **sharded)
    own, choice = chosen(found, "transformers"), chosen(found, "deepspeed")
    assert found.fits(own.candidate, MASTER_BYTES // 8)
    assert not found.fits(own.candidate, MASTER_BYTES), "whole master weights would not fit"
    assert choice.is_own


@pytest.mark.parametrize("name", FORMATS)
def test_the_size_that_divides_the_batch_is_exported(name: str) -> None:
    """Seven sequences are the fastest, and divide no batch of 96."""
    found = simulated(132, losses=["library"], attention_backends=["sdpa"], micro_batch_size=[3, 4, 7])
    assert (found.known.candidate.micro_batch_size, found.known.grad_accum_steps) == (7, None)
    settings = plan(found.source, name)
    assert (settings.micro_batch_size, settings.grad_accum_steps) == (4, 24)
    assert not any("in place of" in line for line in settings.header), "it is the answer's own"


def test_a_batch_that_nothing_divides_is_refused_with_the_nearest() -> None:
    nearest = exploration(candidate(24), known={"dividing_batch_sizes": (504, 528)})
    with pytest.raises(ExportError, match=r"batch_size 512 is divided by no candidate that fits; .* is 504 or 528"):
        plan(nearest)
    with pytest.raises(ExportError, match="is divided by no candidate that fits"):
        plan(nearest, "python")


def test_its_confidence_is_that_among_what_the_trainer_can_be_told() -> None:
    """One candidate alone can be told, so that it is certainly the best of those; the answer was cut off early."""
    small: dict[str, Any] = {"micro_batch_size": [4, 6], "recompute": ["none"], "losses": ["library"], "batch_size": 16}
    found = simulated(132, **small, budget={"max_trials": 2}, verify=False)
    sure = chosen(found, "transformers")
    assert (sure.candidate.micro_batch_size, sure.confidence) == (4, 99)
    header = "\n".join(plan(found.source).header)
    assert f"confidence {sure.confidence} out of 100 among what transformers' Trainer can express" in header
    assert f"tokens/s of each device; confidence {sure.confidence} out of 100" in header


def test_what_stands_in_place_of_the_answer_has_a_figure_of_the_same_scale() -> None:
    """The whole model of the recommended candidate scales what divides the batch, and so what is exported for it."""
    found = simulated(132, losses=["library", "chunked"], micro_batch_size=[3, 4, 7])
    own, report = other_of(found.known, Role.DIVIDING), found.source.report
    assert own.whole_model is None and found.known.whole_model is not None and report is not None
    choice = chosen(found, "transformers")
    (space,) = (prune_space(model, found.request, report) for model in explored_models(found.request, report))
    history = TrialHistory(found.source.trials, found.request.budget, 1)
    posterior = restore_knowledge(space, found.request, report, history).posterior
    rows = [posterior.table.row[each] for each in (choice.candidate, own.candidate, found.known.candidate)]
    figures = [expected_tokens_per_second(posterior, row, rows[-1]) for row in rows]
    assert [choice.tokens_per_second, own.tokens_per_second] == [pytest.approx(each, rel=1e-9) for each in figures[:2]]
    assert choice.loss == pytest.approx(1.0 - figures[0] / figures[1], rel=1e-6)


def test_a_candidate_whose_trial_ran_out_of_memory_is_not_exported() -> None:
    found = simulated(132, losses=["library", "chunked"])
    first = chosen(found, "transformers").candidate
    failed = Measurement(candidate=first, outcome=Outcome.OUT_OF_MEMORY, reason="simulated")
    ran = Trial(number=len(found.source.trials), kind=TrialKind.COMPONENTS, measurement=failed)
    source = replace(found.source, trials=(*found.source.trials, ran))
    second = choose(TRAINERS["transformers"], source, found.request, found.known)
    assert second.candidate != first


@pytest.mark.parametrize("name", ["transformers", "deepspeed", "megatron", "axolotl", "llamafactory"])
def test_nothing_is_exported_if_nothing_that_was_explored_can_be_told(name: str) -> None:
    found = simulated(22, execution="compile")
    with pytest.raises(ExportError, match=r"execution 'compile', and no explored candidate .* see `--trainer`"):
        plan(found.source, name)
    assert plan(found.source, "python").compiled_layers
    assert plan(found.source, "accelerate").compiled_layers


@pytest.mark.parametrize("changed", [{"parts": None}, {"expert_backends": ()}, {"attention_backends": ()}])
def test_what_another_version_stored_of_a_device_takes_no_candidate_from_it(changed: dict[str, Any]) -> None:
    """Exploring there again would admit nothing: its parts are not described, or its back ends have other names."""
    found = simulated(132, losses=["library", "chunked"])
    assert not chosen(found, "transformers").is_own
    assert found.source.report is not None
    stored = replace(found.source, report=found.source.report.model_copy(update=changed))
    assert plan(stored, "python").micro_batch_size == plan(found.source, "python").micro_batch_size
    assert choose(TRAINERS["transformers"], stored, found.request, found.known).is_own


@pytest.mark.parametrize(
    ("best", "asked", "words"),
    [
        (candidate(execution="graph"), {"execution": ["graph"]}, "execution 'graph'"),
        (candidate(kernels="liger"), {"kernels": ["liger"]}, "the kernels of liger"),
        (candidate(bta_tile=2), {}, "attention tiles of 2 sequences"),
        (candidate(recompute="offload"), {"recompute": ["offload"]}, "the recomputation policy 'offload'"),
        (candidate(expert_backend="bexp_fused"), {}, "the expert kernels 'bexp_fused'"),
    ],
)
def test_what_nothing_replaces_is_refused_without_trials(best: Candidate, asked: dict[str, Any], words: str) -> None:
    answer = exploration(best, **asked)
    with pytest.raises(ExportError, match=f"transformers' Trainer cannot express {words}"):
        plan(answer)
    assert plan(answer, "python").candidate == best


@pytest.mark.parametrize("name", ["llamafactory", "axolotl"])
def test_an_alpha_that_a_trainer_would_round_is_refused(name: str) -> None:
    answer = exploration(training={"lora": LORA | {"alpha": 12.5}})
    with pytest.raises(ExportError, match=r"cannot express a LoRA alpha that is no whole number \(12.5\)"):
        plan(answer, name)
    assert any("lora_alpha=12.5" in line for line in export("transformers", answer).header)
    assert name not in offered(answer) and "transformers" in offered(answer)


def test_full_logits_have_to_fit_without_trials_too() -> None:
    size = 24 * 4096 * LOGIT_BYTES
    best = candidate(24, loss="chunked")
    fits: dict[str, Any] = {"required_bytes": 139 * GIB - round(1.1 * size)}
    assert plan(exploration(best, batch_size=48, known=fits)).micro_batch_size == 24
    tight: dict[str, Any] = {"required_bytes": 139 * GIB - round(0.97 * size)}
    with pytest.raises(ExportError, match="cannot express the chunked loss"):
        plan(exploration(best, batch_size=48, known=tight))


@pytest.mark.parametrize("name", ["transformers", "trl"])
def test_every_second_layer_is_not_the_first_half_where_layers_differ(name: str) -> None:
    """The first layers were measured; the trainer would recompute those of one kind, here of each with a window."""
    answer = exploration(candidate(recompute=Recompute.PARTIAL_50))
    window = PARTS.kinds[0].model_copy(update={"name": "window"})
    differing = with_parts(answer, kinds=(*PARTS.kinds, window), layers=("window", "moe") * 8)
    assert plan(answer, name).recompute is Recompute.PARTIAL_50
    assert plan(differing, name).recompute is Recompute.FULL
    header = "\n".join(plan(differing, name).header)
    assert "cannot express the recomputation policy 'partial_50' of layers that differ" in header
    assert "'full' is used in place of 'partial_50'" in header
    for other in ("python", "lightning"):
        assert plan(differing, other).recompute is Recompute.PARTIAL_50
    policies = [candidate(recompute=policy) for policy in (Recompute.NONE, Recompute.PARTIAL_50, Recompute.FULL)]
    for source, number in ((differing, 2), (answer, 3)):
        assert source.request is not None and source.report is not None
        asked = source.request.model_copy(update={"trainer": TrainerName(name)})
        assert len(expressible(policies, lambda one: one, asked, source.report)) == number


def test_sharding_that_a_trainer_lacks_becomes_the_next_level() -> None:
    answer = exploration(num_devices=8, training={"sharding": "zero1"})
    assert plan(answer).sharding is Sharding.ZERO2
    assert plan(answer, "deepspeed").sharding is Sharding.ZERO1
    assert any("'zero2' is used in place of 'zero1'" in line for line in plan(answer).header)


SHARED = candidate(context_parallel_size=2, context_parallel_layout="zigzag")
LORA: dict[str, Any] = {"r": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (exploration(mode="eval"), 0),
        (exploration(SHARED, num_devices=8, context_parallel={"sizes": [2]}), 3),
        (exploration(training={"optimizer": {"name": "adamw_cpu_offload"}}), 1),
        (exploration(num_devices=8, training={"sharding": "zero2", "lora": LORA}), 7),
        (exploration(training={"lora": {"r": 8, "target_parameters": ["experts.gate_up_proj"]}}), 7),
        (exploration(lengths=LENGTHS, batching="packed"), 6),
        (exploration(candidate(1, attention_backend="flash_attention_2"), lengths=LENGTHS, batching="packed"), 7),
        (own_exploration(64, "gradient_checkpointing=false"), len(FORMATS)),
    ],
    ids=["evaluation", "shared sequences", "optimizer", "sharded adapters", "parameters", "rows", "row", "setting"],
)
def test_the_formats_that_are_offered_are_those_that_can_be_made(answer: ExportSource, number: int) -> None:
    assert len(offered(answer)) >= number > 0 or not (offered(answer) or number)
    for name in FORMATS:
        with nullcontext() if name in offered(answer) else pytest.raises(ExportError):
            export(name, answer)


def test_there_is_nothing_to_export_without_an_answer_for_training() -> None:
    answer = exploration()
    waiting = ExportSource("job1", answer.request, answer.report, None, missing="It has not started yet.")
    with pytest.raises(ExportError, match="has not started yet"):
        plan(waiting)
    with pytest.raises(ExportError, match="mode: eval"):
        plan(exploration(mode="eval"))
    with pytest.raises(ExportError, match="cannot read it"):
        plan(ExportSource("job1", None, None, answer.recommendation))
    with pytest.raises(UnknownFormatError, match="the formats are python, transformers, trl, accelerate"):
        export("toml", answer)


def test_a_provisional_answer_says_so() -> None:
    assert any(line.startswith("provisional:") for line in plan(exploration(final=False)).header)
    assert not any(line.startswith("provisional:") for line in plan(exploration()).header)


def test_only_a_trainer_that_knows_the_capacity_of_experts_is_told_such_a_model() -> None:
    answer = exploration(candidate(capacity_factor=1.2345678))
    assert offered(answer) == ["megatron"]
    text = export("megatron", answer).text
    for flag in ("capacity-factor 1.2345678", "token-drop-policy probs", "token-dispatcher-type alltoall"):
        assert flag in text
    with pytest.raises(ExportError, match="DeepSpeed cannot express a capacity factor of experts; these can: megatron"):
        export("deepspeed", answer)


def test_the_batch_of_a_training_command_is_kept_though_the_request_states_none() -> None:
    own = {"target": "mine", "target_version": "1.0", "seq_length": 64}
    found = with_parts(own_exploration(64), **own, batch_size=24, micro_batch_size=2)
    assert found.request is not None
    text = export("transformers", replace(found, request=found.request.model_copy(update={"batch_size": None})))
    assert '"gradient_accumulation_steps": 6' in text.text
    assert not any("set the accumulation yourself" in line for line in text.header)
