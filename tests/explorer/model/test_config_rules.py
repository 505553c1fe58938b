"""What a config.json may hold: bounds of numbers and texts, and nothing that names code or a place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.base import RuleError
from bexp.explorer.model.config_rules import LONGEST_TEXT, MAX_ITEMS, check_hugging_face_config

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"
LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}


def refusal(config: dict[str, Any]) -> tuple[str, str]:
    """Where a configuration is at fault, and why."""
    with pytest.raises(RuleError) as caught:
        check_hugging_face_config(LLAMA | config)
    return ".".join(caught.value.fields[0]), str(caught.value)


@pytest.mark.parametrize(
    ("config", "place", "reason"),
    [
        ({"num_hidden_layers": 300_000_000}, "num_hidden_layers", "from -512 to 512"),
        ({"text_config": {"decoder_layers": 10**9}}, "text_config.decoder_layers", "from -512 to 512"),
        ({"depths": [2, 2, 10**6]}, "depths.2", "from -512 to 512"),
        ({"num_local_experts": 10**6}, "num_local_experts", "to 16,384"),
        ({"num_attention_heads": 10**6}, "num_attention_heads", "to 4,096"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok", "from 1 to 4, the number of experts"),
        (
            {"text_config": {"n_routed_experts": 4, "num_experts_per_tok": 0}},
            "text_config.num_experts_per_tok",
            "1 to 4",
        ),
        ({"num_experts": 4, "num_experts_per_tok": 4}, "", ""),
        ({"num_experts": 1, "num_experts_per_tok": 2}, "", ""),
        ({"vocab_size": 2**31}, "vocab_size", "to 4,194,304"),
        ({"max_position_embeddings": -(2**31)}, "max_position_embeddings", "from -33,554,432"),
        ({"nobody_knows": 2**31}, "nobody_knows", "to 131,072"),
        ({"num_somethings": [[[10**9]]]}, "num_somethings.0.0.0", "to 65,536"),
        ({"mlp_ratio": 1e9}, "mlp_ratio", "to 65,536"),
        ({"rope_theta": 1e308}, "rope_theta", "to 1e+38"),
        ({"initializer_range": float("nan")}, "initializer_range", "must be a number"),
        ({"layer_types": ["full_attention"] * 512}, "", ""),
        ({"layer_types": ["full_attention"] * 513}, "layer_types", "has 513 items; at most 512"),
        ({"text_config": {"layers_block_type": ["moe"] * 3_000}}, "text_config.layers_block_type", "at most 512"),
        ({"attention_types": [[["global"], 600]]}, "attention_types.0.1", "from -512 to 512"),
        ({"suppress_tokens": [1] * (MAX_ITEMS + 1)}, "suppress_tokens", "at most 4,096"),
        ({"languages": [f"l{i}" for i in range(81)], "num_hidden_layers": 24}, "", ""),
        ({"languages": [f"l{i}" for i in range(200)], "num_hidden_layers": 24}, "num_hidden_layers", "at most 4,096"),
        ({"sizes": {f"k{i}": 1 for i in range(MAX_ITEMS + 1)}}, "sizes", "at most 4,096"),
        ({"hidden_act": "x" * (LONGEST_TEXT + 1)}, "hidden_act", "longer than 256"),
        ({"x" * (LONGEST_TEXT + 1): 1}, "x" * (LONGEST_TEXT + 1), "longer than 256"),
    ],
)
def test_a_value_out_of_bounds_is_refused_where_it_stands(config: dict[str, Any], place: str, reason: str) -> None:
    if not place:
        assert check_hugging_face_config(LLAMA | config)
        return
    found, why = refusal(config)
    assert found == place
    assert reason in why


WIDE = {"hidden_size": 2**17, "ffn_dim": 2**17}


@pytest.mark.parametrize(
    ("config", "places", "reason"),
    [
        ({"n_layer": 512, "n_routed_experts": 16384}, {"n_layer", "n_routed_experts"}, "512 layers"),
        (WIDE | {"n_layer": 64, "n_experts": 16384}, {"hidden_size", "n_experts"}, "64 layers, 16,384 experts"),
        (WIDE | {"n_head": 4096, "head_dim": 4096, "n_layer": 512, "experts": 3}, {"head_dim"}, "could have"),
        ({"a": {"n_layers": 512}, "b": {"experts": 2049}}, {"a.n_layers", "b.experts"}, "512 layers of 2,049 experts"),
    ],
)
def test_a_product_of_values_within_their_bounds_is_bounded_too(
    config: dict[str, Any], places: set[str], reason: str
) -> None:
    with pytest.raises(RuleError, match=reason) as caught:
        check_hugging_face_config(LLAMA | config)
    assert places <= {".".join(path) for path in caught.value.fields}


NAMES: list[dict[str, Any]] = [
    {"attn_implementation": "owner/kernels@revision"},
    {"attn_implementation": {"": "owner/kernels", "text_config": "sdpa"}},
    {"_attn_implementation": "flash_attention_2"},
    {"_attn_implementation_internal": "owner/kernels:flash"},
    {"experts_implementation": "sonicmoe"},
    {"text_config": {"attn_implementation": "owner/kernels"}},
    {"per_layer_config": {"0": {"attn_implementation": "owner/kernels"}}},
    {"auto_map": {"AutoModelForCausalLM": "owner/name--code.Model"}},
    {"text_config": {"auto_map": {"AutoModel": "code.Model"}}},
    {"attribute_map": {"nobody_knows": "num_experts"}, "nobody_knows": 1 << 17},
    {"text_config": {"sub_configs": {"vision_config": "Config"}}},
    {"name_or_path": "gpt2"},
    {"tokenizer_name_or_path": "gpt2"},
    {"base_model": "owner/name"},
    {"hidden_act": "owner/activation"},
    {"rope_scaling": {"rope_type": "https://example.org/rope.py"}},
    {"weights": ["../../etc/passwd"]},
    {"gguf_file": "model.gguf"},
    {"backbone": "resnet50", "use_timm_backbone": True, "use_pretrained_backbone": True},
    {"use_kernels": True, "kernel_config": {"repo": "owner/kernels"}},
    {"custom_pipelines": {"any": {"impl": "code.Pipeline"}}},
    {"quantization_config": {"load_in_4bit": True, "llm_int8_skip_modules": ["(.*)*x"]}},
    {"quantization_config": {"load_in_4bit": True, "llm_int8_skip_modules": [".*.*.*.*.*x"]}},
    {"__class__": "Other", "a": {"__dict__": {"x": 1}}},
    {"a key with spaces": 1},
]


@pytest.mark.parametrize("names", NAMES)
def test_what_names_code_or_a_place_reaches_no_library(names: dict[str, Any]) -> None:
    """A published file is read without it; what has not been read as such is refused."""
    refusal(names)
    request = parse_request({"hf_config": LLAMA | names, "hf_seq_length": 16, "quantization": "none"})
    assert any("of config.json left out" in notice for notice in request.notices)
    left = json.dumps(request.hf_config)
    assert not any(
        text in left for text in ("owner", "gpt2", "/", "code", "flash", "sonic", "resnet", "*", "gguf", "__")
    )


def test_a_number_format_is_one_of_those_that_there_are() -> None:
    for name in ("load", "float", "manual_seed", "bfloat16; x", "hub"):
        key = {"float": None}.get(name, name)
        for config in ({"dtype": name}, {"text_config": {"torch_dtype": name}}, {"mamba_ssm_dtype": name}):
            if key is None:
                assert check_hugging_face_config(LLAMA | config)
            else:
                refusal(config)
    for name in ("bfloat16", "float8_e4m3fn", "fp32", "auto", "uint8"):
        assert check_hugging_face_config(LLAMA | {"dtype": name})


def test_the_name_of_the_exploration_and_labels_may_be_any_text() -> None:
    config = LLAMA | {"_name_or_path": "/home/me/llama", "id2label": {"0": "a/b"}, "label2id": {"a/b @ c": 0}}
    assert check_hugging_face_config(config) == config
    request = parse_request({"hf_config": config, "hf_seq_length": 16, "target": "mine"})
    assert (request.hf_config, request.notices) == (config, ())
    assert refusal({"text_config": {"_name_or_path": "owner/name"}})[0] == "text_config._name_or_path"


@pytest.mark.parametrize("file", sorted(PUBLISHED.glob("*.json")), ids=lambda file: file.stem)
def test_published_files_are_read_whole(file: Path) -> None:
    config = json.loads(file.read_text())
    assert check_hugging_face_config(config) == config
    assert not parse_request({"hf_config": config, "hf_seq_length": 128, "target": "mine"}).notices


def test_every_refusal_of_a_submission_names_the_field_of_the_document() -> None:
    with pytest.raises(FormatError) as caught:
        parse_request({**LLAMA, "num_hidden_layers": 300_000_000, "seq_length": 8})
    assert caught.value.errors == [(("num_hidden_layers",), "must be a number from -512 to 512")]
