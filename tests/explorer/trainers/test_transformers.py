"""The Trainer of transformers: fields of its TrainingArguments."""

from __future__ import annotations

import json

import pytest

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.export import export
from tests.explorer.exports.samples import SHARDED, candidate, exploration
from tests.explorer.exports.test_formats import FULL


def test_transformers_fields() -> None:
    """The model's kernels stand in the header, because they are no arguments of the training."""
    made = export("transformers", exploration(FULL))
    assert json.loads(made.text) == {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 64,
        "auto_find_batch_size": False,
        "torch_compile": False,
        "optim": "adamw_torch_fused",
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    }
    header = "\n".join(made.header)
    assert 'from_pretrained(..., attn_implementation="sdpa", experts_implementation="grouped_mm")' in header
    assert "weights: make the model with dtype=bfloat16, as measured" in header
    assert "sequences of 4096 tokens, as measured" in header
    plain = json.loads(export("transformers", exploration()).text)
    assert plain["activation_checkpointing"] is False
    half = json.loads(export("transformers", exploration(candidate(recompute=Recompute.PARTIAL_50))).text)
    assert half["activation_checkpointing_kwargs"] == {"use_reentrant": False, "every_n_layers": 2}
    sharded = json.loads(export("transformers", exploration(FULL, **SHARDED)).text)
    assert (sharded["gradient_accumulation_steps"], sharded["fsdp"], sharded["activation_checkpointing"]) == (
        8,
        True,
        False,
    )
    assert sharded["fsdp_config"] == {"version": 2, "reshard_after_forward": True, "activation_checkpointing": True}


@pytest.mark.parametrize(
    ("recompute", "every"), [("layers_3", 4), ("layers_5", 2), ("layers_9", None), ("groups_4", None)]
)
def test_a_number_of_layers_becomes_a_policy_that_recomputes_as_many(recompute: str, every: int | None) -> None:
    found = export("transformers", exploration(candidate(recompute=Recompute(recompute))))
    header = "\n".join(found.header)
    assert f"cannot express the recomputation policy '{recompute}'" in header
    assert f"is used in place of '{recompute}'" in header
    document = json.loads(found.text)
    assert document["activation_checkpointing"]
    assert document["activation_checkpointing_kwargs"].get("every_n_layers") == every
