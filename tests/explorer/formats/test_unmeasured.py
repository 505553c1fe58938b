"""What is said at once of a config.json: another kind of model, an unknown type, a sequence that is too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bexp.explorer.formats.model_types import model_types
from bexp.explorer.formats.request import parse_request
from tests.explorer.formats.refusals import refusal

WAY = "bexp explore config.json --target examples/targets/hugging_face.py:Target"
WRITTEN = "target of your own, which you write"
OTHER_WAYS = {"qwen3": "jq 'del(.vision_config)' config.json |", "wav2vec2": WRITTEN, "timesfm": WRITTEN}
GEMMA3: dict[str, Any] = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}, "vision_config": {}}
LLAVA: dict[str, Any] = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}}
PLACES: list[tuple[tuple[str, ...], Callable[[Any], Any]]] = [
    ((), lambda config: config),
    (("model",), lambda config: {"model": config}),
    (("hf_config",), lambda config: {"hf_config": config}),
]


@pytest.mark.parametrize("target", [{}, {"target": "transformers"}, {"target": "bexp"}])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"model_type": "vit", "image_size": 224}, "'vit' is a vision network"),
        ({"model_type": "t5"}, "'t5' is an encoder with a decoder"),
        ({"model_type": "bart", "is_encoder_decoder": True, "is_decoder": True}, "'bart' is an encoder with a decoder"),
        ({"model_type": "whisper"}, "'whisper' is an encoder with a decoder"),
        ({"model_type": "bert"}, "'bert' is an encoder; exploration is limited to causal language models"),
        ({"model_type": "qwen2_vl", "hidden_size": 8}, "'qwen2_vl' is a vision-language model"),
        ({"model_type": "clip"}, "'clip' is a vision-language model"),
        ({"model_type": "qwen3", "vision_config": {"depth": 1}}, "'qwen3' is a vision-language model"),
        ({"model_type": "wav2vec2"}, "'wav2vec2' is an audio network"),
        ({"model_type": "timesfm"}, "'timesfm' is no causal language model"),
    ],
)
def test_another_model_is_refused_by_its_type_with_a_way_that_measures_it(
    config: dict[str, Any], what: str, place: tuple[tuple[str, ...], Callable[[Any], Any]], target: dict[str, Any]
) -> None:
    location, document = place
    message = refusal(document(config), **target)[(*location, "model_type")]
    assert message.startswith(what)
    way = OTHER_WAYS.get(config["model_type"], WAY)
    assert way in message
    assert (WAY in message) is (way == WAY)


@pytest.mark.parametrize("model_type", ["vit", "t5", "bert", "llava", "not_there_yet"])
def test_a_target_of_ones_own_takes_any_config(model_type: str) -> None:
    request = parse_request({"model_type": model_type, "target": "mine", "seq_length": 8})
    assert (request.hf_config, request.notices) == ({"model_type": model_type}, ())


@pytest.mark.parametrize(
    ("config", "query"),
    [
        (LLAVA, "jq .text_config config.json"),
        (GEMMA3, """jq '.text_config + {model_type: "gemma3_text"}' config.json"""),
    ],
)
def test_the_text_config_of_a_vision_language_model_is_explored_alone(config: dict[str, Any], query: str) -> None:
    assert f"{query} | bexp explore -" in refusal(config)["model_type",]
    inner = {"model_type": "gemma3_text"} | config["text_config"]
    assert parse_request({**inner, "seq_length": 64}).hf_config == inner


def test_an_encoder_that_is_trained_as_a_decoder_is_explored() -> None:
    assert "is_decoder: true makes it one" in refusal({"model_type": "bert"})["model_type",]
    assert parse_request({"model_type": "bert", "is_decoder": True, "seq_length": 64}).notices == ()
    assert parse_request({"model_type": "bart", "is_decoder": True, "is_encoder_decoder": False, "seq_length": 64})


@pytest.mark.parametrize(
    ("model_type", "what"), [("distilbert", "an encoder"), ("deberta-v2", "an encoder"), ("t5", "an encoder with a ")]
)
@pytest.mark.parametrize("is_decoder", [False, True])
def test_an_encoder_without_a_causal_class_is_refused_whatever_is_decoder_says(
    model_type: str, what: str, is_decoder: bool
) -> None:
    message = refusal({"model_type": model_type, "is_decoder": is_decoder})["model_type",]
    assert message.startswith(f"{model_type!r} is {what}")
    assert "is_decoder" not in message
    assert WAY in message


@pytest.mark.parametrize("name", ["qwen9", "llama5", "gemma7_text", "entirely_new"])
def test_a_type_that_may_be_newer_is_noted(name: str) -> None:
    (notice,) = parse_request({"model_type": name, "seq_length": 64}).notices
    assert notice == (
        f"model_type '{name}' is not known to transformers {model_types().version} as far as this version of bexp "
        "knows; a worker's library decides"
    )


@pytest.mark.parametrize(("name", "meant"), [("lamma", "llama"), ("gpt-2", "gpt2"), ("qwen3moe", "qwen3_moe")])
def test_a_misspelt_type_is_refused_unless_the_library_is_asked(name: str, meant: str) -> None:
    assert f"(did you mean '{meant}'?)" in refusal({"model_type": name})["model_type",]
    (notice,) = parse_request({"model_type": name, "seq_length": 64, "target": "transformers"}).notices
    assert notice.endswith(f"(did you mean '{meant}'?); a worker's library decides")


def test_an_unknown_type_that_reads_images_is_refused() -> None:
    assert "vision network" in refusal({"model_type": "new_one", "vision_config": {"depth": 2}})["vision_config",]


@pytest.mark.parametrize(
    ("document", "location"),
    [
        ({"model_type": "gpt2", "n_positions": 512, "seq_length": 1024}, ("seq_length",)),
        ({"model": {"model_type": "gpt2", "seq_length": 1025}}, ("model", "seq_length")),
        ({"hf_config": {"model_type": "opt", "max_position_embeddings": 64}, "hf_seq_length": 65}, ("hf_seq_length",)),
    ],
)
def test_a_sequence_beyond_a_table_of_positions_is_refused(document: Any, location: tuple[str, ...]) -> None:
    assert "it has no others" in refusal(document)[location]


@pytest.mark.parametrize(("padding", "longest"), [({}, 512), ({"pad_token_id": 1}, 512), ({"pad_token_id": 0}, 513)])
def test_a_type_like_roberta_keeps_the_positions_up_to_padding(padding: dict[str, int], longest: int) -> None:
    config = {"model_type": "roberta", "is_decoder": True, "max_position_embeddings": 514, **padding}
    assert parse_request(config).hf_seq_length == longest
    assert parse_request({**config, "seq_length": longest}).notices == ()
    assert refusal({**config, "seq_length": longest + 1})["seq_length",] == (
        f"{longest + 1} tokens are more than the {longest} positions of the model (max_position_embeddings less "
        f"{514 - longest} that no token has); it has no others"
    )


@pytest.mark.parametrize("target", ["transformers", "bexp"])
def test_a_sequence_beyond_rotary_positions_is_noted(target: str) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 2048, "seq_length": 4096, "target": target}
    (notice,) = parse_request(config).notices
    assert notice.startswith("4,096 tokens are more than the 2,048 positions of the model (max_position_embeddings)")
    assert parse_request({**config, "seq_length": 2048}).notices == ()
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    assert parse_request({**config, **scaled}).notices == ()
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert len(parse_request({**config, **plain, "target": "transformers"}).notices) == 1


def test_without_a_length_gpt2_gets_the_positions_that_its_class_has() -> None:
    assert parse_request({"model_type": "gpt2"}).seq_length == 1024
