"""The trainer that a request names: what it fills in, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.model.base import RuleError
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.trainers.registry import TRAINERS, TrainerName
from tests.explorer.exports.samples import CONFIG
from tests.explorer.request.test_request import MODEL, MOE

LIBRARY: dict[str, Any] = {"hf_config": CONFIG, "hf_seq_length": 64}
SHAPES: dict[str, Any] = {"model": MODEL}


def build(base: dict[str, Any], trainer: str | None = None, **changes: Any) -> ExplorationRequest:
    named = {} if trainer is None else {"trainer": trainer}
    return ExplorationRequest.model_validate({**base, **named, **changes})


def refusal(base: dict[str, Any], trainer: str, **changes: Any) -> RuleError:
    with pytest.raises(ValidationError) as caught:
        build(base, trainer, **changes)
    (detail,) = caught.value.errors()
    error = detail["ctx"]["error"]
    assert isinstance(error, RuleError)
    return error


def test_without_a_trainer_everything_is_explored_for_bexp_apply() -> None:
    asked = build(LIBRARY)
    assert asked.trainer is None
    assert asked.runner is TRAINERS["bexp"]
    assert (asked.training.precision, asked.allocator) == ("pure", "default")


def test_a_stated_field_goes_before_a_trainers_default() -> None:
    asked = build(LIBRARY, "deepspeed", training={"precision": "autocast"})
    assert asked.training.precision == "autocast"
    assert build(LIBRARY, "axolotl", allocator="default").allocator == "default"
    loss = build(SHAPES, "bexp", training={"loss": {"kind": "full"}}).training.loss
    assert loss.kind == "full"


def test_shapes_have_full_logits_where_the_trainer_has_no_loss_in_chunks() -> None:
    for trainer in TrainerName:
        asked = build(SHAPES, trainer.value)
        chunked = {"bexp", "torchtitan", "torchtune", "cerebras"}
        chunks = trainer in chunked
        assert asked.training.loss.kind == ("chunked" if chunks else "full"), trainer
    sized = build(SHAPES, "transformers", training={"loss": {"chunk_tokens": 256}})
    assert (sized.training.loss.kind, sized.training.loss.chunk_tokens) == ("full", 256)


def test_shapes_have_master_weights_unless_the_trainer_keeps_no_weights_in_float32() -> None:
    for trainer in TrainerName:
        asked = build(SHAPES, trainer.value)
        pure = trainer in {"axolotl", "torchtune"}
        assert (asked.training.optimizer.master_dtype is None) is pure, trainer


def test_a_persons_own_code_keeps_its_number_formats_with_every_trainer() -> None:
    own = {**LIBRARY, "target": "local.mine"}
    for trainer in TrainerName:
        assert build(own, trainer.value).training.precision == "pure"


def test_adapters_keep_their_own_number_formats() -> None:
    lora = {"lora": {"r": 4, "target_modules": "all-linear"}}
    assert build(LIBRARY, "deepspeed", training=lora).training.precision == "pure"


SHARED: dict[str, Any] = {"num_devices": 2, "batch_size": 64}


@pytest.mark.parametrize(
    ("base", "trainer", "changes", "field", "words", "able"),
    [
        (LIBRARY, "transformers", {"recompute": ["activations"]}, "recompute", "policy 'activations'", "bexp"),
        (SHAPES, "transformers", {"bta": {"enable": True}}, "bta", "attention tiles", "cerebras"),
        (LIBRARY, "llamafactory", {"attention_backends": ["flex_attention"]}, "attention_backends", "flex_", "axolotl"),
        (LIBRARY, "torchtitan", {"expert_backends": ["bexp_fused"]}, "expert_backends", "'bexp_fused'", "bexp"),
        (LIBRARY, "deepspeed", {"kernels": ["liger"]}, "kernels", "the kernels of liger", "bexp"),
        (LIBRARY, "lightning", {"losses": ["library", "chunked"]}, "losses", "the chunked loss", "torchtitan"),
        (SHAPES, "axolotl", {"training": {"loss": {"kind": "chunked"}}}, "training.loss", "the chunked loss", "bexp"),
        (LIBRARY, "megatron", {"execution": "compile"}, "execution", "execution 'compile'", "accelerate"),
        (LIBRARY, "axolotl", {"training": {"precision": "autocast"}}, "training.precision", "'autocast'", "lightning"),
        (
            SHAPES,
            "megatron",
            {"training": {"optimizer": {"master_dtype": None}}},
            "training.optimizer.master_dtype",
            "training without float32 master weights",
            "axolotl",
        ),
        (
            SHAPES,
            "deepspeed",
            {"training": {"optimizer": {"grad_dtype": "float32"}}},
            "training.optimizer.grad_dtype",
            "gradients in float32",
            "megatron",
        ),
        *(
            (
                LIBRARY,
                name,
                {"training": {"lora": {"r": 4, "target_modules": "all-linear"}}},
                "training.lora",
                "LoRA",
                "trl",
            )
            for name in ("megatron", "torchtitan", "cerebras")
        ),
        (
            LIBRARY,
            "transformers",
            {**SHARED, "sharding_levels": ["none", "zero1"]},
            "sharding_levels",
            "the sharding level 'zero1'",
            "megatron",
        ),
    ],
)
def test_what_a_trainer_cannot_be_told_is_refused_with_those_that_can(
    base: dict[str, Any], trainer: str, changes: dict[str, Any], field: str, words: str, able: str
) -> None:
    error = refusal(base, trainer, **changes)
    assert error.fields == (tuple(field.split(".")), ("trainer",))
    message = str(error)
    assert f"{TRAINERS[trainer].title} cannot express" in message
    assert words in message
    hint = message.split("; these can: ")[1].split(", ")
    assert able in hint
    assert trainer not in hint
    for name in hint:  # what is hinted at is accepted
        build(base, name, **changes)


def test_meshes_and_shared_sequences_are_for_trainers_that_have_them() -> None:
    shared = {**SHAPES, "num_devices": 4, "batch_size": 64, "context_parallel": {"sizes": [2]}}
    assert refusal(shared, "deepspeed").fields[0] == ("context_parallel", "sizes")
    assert build(shared, "torchtitan").trainer == "torchtitan"
    mesh = {**SHAPES, "num_devices": 4, "batch_size": 64, "parallelism": {"tensor": [2]}}
    assert refusal(mesh, "accelerate").fields[0] == ("parallelism",)
    assert refusal({**mesh, "parallelism": {"pipeline": 2}}, "accelerate").fields[0] == ("parallelism",)
    assert build(mesh, "megatron").trainer == "megatron"


def test_states_in_a_format_that_no_trainer_keeps_are_refused() -> None:
    states: dict[str, Any] = {"training": {"optimizer": {"state_dtype": "bfloat16"}}}
    assert str(refusal(SHAPES, "deepspeed", **states)) == "DeepSpeed cannot express optimizer states in bfloat16"
    assert build(SHAPES, **states).trainer is None
    assert build(SHAPES, "axolotl", **states), "it trains bfloat16 weights without master weights"


def test_what_a_device_may_do_by_itself_need_not_be_told() -> None:
    """A device without grouped kernels loops over the experts, and torch's kernels are chosen for it."""
    experts = {"model": MOE}
    asked = build(experts, "llamafactory", expert_backends=["loop"], attention_backends=["cudnn"])
    assert asked.expert_backends == ("loop",)
    assert refusal(experts, "llamafactory", expert_backends=["bmm"]).fields == (("expert_backends",), ("trainer",))


FLOAT8: dict[str, Any] = {"training": {"precision": "float8_rowwise"}}
OFFLOAD: dict[str, Any] = {"recompute": ["offload"]}
ADAPTERS: dict[str, Any] = {"lora": {"r": 8, "target_modules": ["q_proj"]}}


@pytest.mark.parametrize(
    ("base", "asked", "why"),
    [
        (SHAPES, FLOAT8, "precision 'float8_rowwise' needs target 'transformers'"),
        (LIBRARY, FLOAT8 | {"num_devices": 2}, "precision 'float8_rowwise' is measured on one device"),
        (LIBRARY, FLOAT8 | {"mode": "eval"}, "precision 'float8_rowwise' is one of training"),
        (LIBRARY, FLOAT8 | {"trainer": "trl"}, "TRL cannot express precision 'float8_rowwise'; these can: bexp"),
        (LIBRARY, {"training": FLOAT8["training"] | ADAPTERS}, "precision 'float8_rowwise' is measured without LoRA"),
        (SHAPES, OFFLOAD, "recompute 'offload' needs target 'transformers'"),
        (LIBRARY, OFFLOAD | {"num_devices": 2}, "recompute 'offload' needs num_devices 1"),
        (LIBRARY, OFFLOAD | {"device_kind": "cpu"}, "recompute 'offload' needs a GPU"),
        (LIBRARY, OFFLOAD | {"execution": "compile"}, "recompute 'offload' needs execution 'eager'"),
        (LIBRARY, OFFLOAD | {"trainer": "transformers"}, "cannot express .*'offload'"),
    ],
)
def test_float8_and_activations_on_the_host_are_for_the_librarys_models_on_one_gpu(
    base: dict[str, Any], asked: dict[str, Any], why: str
) -> None:
    assert build(LIBRARY, "bexp", **FLOAT8).training.float8_recipe == "rowwise"
    build(LIBRARY, "bexp", recompute=["none", "offload"], execution=["eager", "compile"])
    with pytest.raises(ValidationError, match=why):
        build(base, **asked)
