"""The language models of models that read images: every way that a refusal names runs, and twins compute the same."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from bexp.explorer.formats.model_types import TEXT_TWINS
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.target import OWN_TARGET
from bexp.targets.process import load_target
from bexp.workers.targets.transformers.config import ResolvedConfig, _with_floats, resolve_config
from tests.explorer.formats.refusals import refusal

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[4]
TOKENS = 17
TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
OMNI = {"thinker_config": {"text_config": {**TEXT, **ROPE, "model_type": "qwen2_5_omni_text"}}}


def nested(model_type: str, text_type: str | None, **more: Any) -> dict[str, Any]:
    """A configuration with that of its language model in it, whose type may be left to the library."""
    named = {} if text_type is None else {"model_type": text_type}
    return {"model_type": model_type, "text_config": {**TEXT, **more, **named}, "vision_config": {}}


WHOLE: dict[str, dict[str, Any]] = {
    "qwen2_vl": nested("qwen2_vl", "qwen2_vl_text", **ROPE),
    "qwen2_vl, as it was published": {"model_type": "qwen2_vl", **TEXT, **ROPE, "vision_config": {"depth": 2}},
    "qwen2_5_vl": nested("qwen2_5_vl", "qwen2_5_vl_text", **ROPE),
    "qwen3_vl": nested("qwen3_vl", "qwen3_vl_text", **ROPE),
    "qwen3_vl without a type": nested("qwen3_vl", None, **ROPE),
    "qwen3_vl_moe": nested("qwen3_vl_moe", "qwen3_vl_moe_text", **ROPE, **EXPERTS),
    "qwen2_5_omni": {"model_type": "qwen2_5_omni", **OMNI},
    "gemma3": nested("gemma3", None),
    "llava": nested("llava", "llama"),
    "llava without a type": nested("llava", None),
    "pixtral": nested("llava", "mistral"),
    "internvl": nested("internvl", "qwen2"),
    "internvl, as it was published": {"model_type": "internvl_chat", "llm_config": {**TEXT, "model_type": "qwen2"}}
    | {"vision_config": {"image_size": 448}},
    "idefics3": nested("idefics3", None),
    "smolvlm": nested("smolvlm", "llama"),
    "mistral3": nested("mistral3", "mistral"),
    "a causal type with images": {"model_type": "qwen3", **TEXT, "vision_config": {"depth": 2}},
}


def resolved(config: dict[str, Any]) -> ResolvedConfig:
    hf_config = parse_request({**config, "seq_length": TOKENS}).hf_config
    assert hf_config is not None
    return resolve_config(hf_config, TOKENS)


@pytest.mark.skipif(shutil.which("jq") is None, reason="the messages name jq, which is not installed")
@pytest.mark.parametrize("name", WHOLE)
def test_the_query_that_a_refusal_names_finds_a_model_that_trains(name: str) -> None:
    (message,) = refusal(WHOLE[name]).values()
    (command,) = re.findall(r"(jq .*?) config\.json \| bexp explore -", message)
    done = subprocess.run(
        shlex.split(command), input=json.dumps(WHOLE[name]), capture_output=True, text=True, check=True
    )
    found = resolved(json.loads(done.stdout))
    model: Any = found.model_class(found.config)
    tokens = torch.randint(1, 90, (2, TOKENS))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32},
    **{"depth": 1, "num_heads": 2, "patch_size": 16, "out_hidden_size": 64, "embed_dim": 32, "num_global_layers": 1},
    **{
        "attention_heads": 2,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
        "deepstack_visual_indexes": [0],
    },
}
GLM = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}


@pytest.mark.parametrize(
    ("refused", "whole_type", "text"),
    [
        ("mllama", "mllama", {"num_hidden_layers": 4, "cross_attention_layers": [1]}),
        ("mllama_text_model", "mllama", {"num_hidden_layers": 4, "cross_attention_layers": [1]}),
        ("glm4v_text", "glm4v", GLM),
        ("qwen3_vl", "qwen3_vl", ROPE),
        ("gemma3", "gemma3", {}),
        ("idefics3", "idefics3", {}),
        ("llava", "llava", {"model_type": "mistral"}),
    ],
)
def test_the_target_that_a_refusal_names_trains_the_whole_model_on_text(
    refused: str, whole_type: str, text: dict[str, Any]
) -> None:
    (message,) = refusal({"model_type": refused}).values()
    assert OWN_TARGET[1:] in message
    assert refused == whole_type or f"of type '{whole_type}'" in message
    target = load_target(f"{ROOT}/examples/targets/hugging_face.py:Target")
    whole = {"model_type": whole_type, "text_config": {**TEXT, **text}, "vision_config": VISION, "image_token_index": 3}
    config = {**whole, "image_token_id": 3, "seq_length": TOKENS, "gradient_checkpointing": False}
    model = target.build(config, torch.device("cpu"))
    assert torch.isfinite(target.step(model, target.batch(2, torch.device("cpu"))))
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("text_type", TEXT_TWINS)
def test_a_twin_computes_the_same_on_text(text_type: str) -> None:
    rope = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1] if "glm" in text_type else [2, 3, 3]}}
    config = {"model_type": text_type, **TEXT, **rope, **EXPERTS}
    found = resolved(config)
    assert found.config.model_type == TEXT_TWINS[text_type]
    twin: Any = found.model_class(found.config).eval()
    own_config = transformers.CONFIG_MAPPING[text_type](**{key: config[key] for key in config if key != "model_type"})
    own = own_class(text_type)._from_config(own_config).eval()
    own.load_state_dict(twin.model.state_dict())
    tokens = torch.randint(1, 90, (2, TOKENS))
    with torch.no_grad():
        torch.testing.assert_close(own(tokens).last_hidden_state, twin.model(tokens).last_hidden_state)


def own_class(text_type: str) -> Any:
    """The class of the language model within the larger one, which has no head."""
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerTextModel
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextModel

    within = {
        "qwen2_5_omni_text": Qwen2_5OmniThinkerTextModel,
        "qwen3_omni_moe_text": Qwen3OmniMoeThinkerTextModel,
    }
    return within.get(text_type) or transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[text_type]]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model_type": "glm4_moe", "routed_scaling_factor": 1}, "routed_scaling_factor"),
        ({"model_type": "gpt_oss", "swiglu_limit": 7}, "swiglu_limit"),
        ({"model_type": "llama", "initializer_range": 1}, "initializer_range"),
    ],
)
def test_a_number_that_jq_writes_without_its_point_is_a_float_where_the_class_takes_no_other(
    values: dict[str, Any], field: str
) -> None:
    found = getattr(resolve_config(values, TOKENS).config, field)
    assert (found, type(found)) == (values[field], float)
    assert type(resolve_config(values, TOKENS).config.vocab_size) is int


def test_so_is_one_of_a_configuration_within_another() -> None:
    inner = {"model_type": "gemma3n_text", "final_logit_softcapping": 30}
    for given in (inner, {"final_logit_softcapping": 30}):
        found = _with_floats(transformers.CONFIG_MAPPING["gemma3n"], {"text_config": given, "hidden_size": 8})
        assert type(found["text_config"]["final_logit_softcapping"]) is float
        assert found["hidden_size"] == 8
