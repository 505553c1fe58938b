"""Whatever stands in a document, it becomes a request or a FormatError, and never another exception."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.formats.document import FormatError, load_document
from bexp.explorer.formats.families import FAMILIES
from bexp.explorer.formats.request import parse_request
from bexp.explorer.model.translation import Location

EXAMPLES = Path(__file__).parents[3] / "examples"

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**9, 10**40, -(10**40), 1.5, -0.0, 1e308, float("nan"), float("inf")]),
    st.text(max_size=4),
    st.sampled_from(["explore", "auto", "True", "vit", "llama", "\ud800", "\0"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.just("explore"), inner, max_size=3)
    ),
    max_leaves=6,
)
OPTIONAL = {"rope_parameters": {"rope_type": "default"}, "mlp_only_layers": [0], "layer_types": [], "n_inner": 8}
DOCUMENTS = [load_document(path.read_text()) for path in sorted(EXAMPLES.glob("*.yaml"))]
DOCUMENTS += [{"model_type": name, **family.defaults} for name, family in FAMILIES.items()]
DOCUMENTS += [{"model": {"model_type": name, **OPTIONAL}} for name in FAMILIES]
DOCUMENTS += [
    {"megatron": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 128,
                  "num_experts": 4, "moe_layer_freq": [0, 1], "disable_bias_linear": True, "swiglu": True, "bf16": True,
                  "micro_batch_size": 2, "global_batch_size": 8, "recompute_granularity": "full",
                  "recompute_num_layers": 1, "position_embedding_type": "rope", "rotary_percent": 0.5}},
    {"megatron": ["--num-layers", "2", "--hidden-size=64", "--num-attention-heads", "4", "--seq-length", "64"]},
    {"trainer": {"devices": 2, "precision": 16},
     "model": {"encoder_seq_length": 64, "max_position_embeddings": "${.encoder_seq_length}", "num_layers": 2,
               "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 128,
               "activation": "swiglu", "optim": {"name": "sgd"}, "use_flash_attention": False}},
    {"model_type": "llama", "num_devices": 2,
     "training_arguments": {"per_device_train_batch_size": 2, "bf16": True, "fsdp": ["full_shard"], "optim": "sgd",
                            "deepspeed": {"train_batch_size": "auto"}}},
    {"model_type": "llama", "target": "bexp", "num_devices": 2,
     "deepspeed": {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "train_batch_size": 8,
                   "zero_optimization": {"stage": 1, "offload_param": {"device": "none"}}, "bf16": {"enabled": True},
                   "optimizer": {"type": "Adam"}}},
]  # fmt: skip


def list_locations(data: Any, location: Location = ()) -> list[Location]:
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [location, *(found for key, value in children for found in list_locations(value, (*location, key)))]


def replace(document: dict[str, Any], location: Location, value: Any) -> Any:
    if not location:
        return value
    changed = copy.deepcopy(document)
    holder: Any = changed
    for key in location[:-1]:
        holder = holder[key]
    holder[location[-1]] = value
    return changed


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_value_in_any_place(data: st.DataObject) -> None:
    document = data.draw(st.sampled_from(DOCUMENTS))
    location = data.draw(st.sampled_from(list_locations(document)))
    changed = replace(document, location, data.draw(VALUES))
    try:
        request = parse_request(changed)
    except FormatError as error:
        assert error.errors
        assert all(message and len(message) < 500 for _, message in error.errors)
    else:
        assert request.hf_config is not None or count_parameters(request.shapes) > 0


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="{}[]:,\"'#&*!|>-? \n\ta1.\\u\ud800\0", max_size=30))
def test_any_text(text: str) -> None:
    try:
        document = load_document(text)
    except FormatError as error:
        assert error.errors
    else:
        assert isinstance(document, dict)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(alphabet="model.seq_length", min_size=1, max_size=12), VALUES, max_size=3))
def test_any_override(overrides: dict[str, Any]) -> None:
    try:
        parse_request(DOCUMENTS[0], overrides=overrides)
    except FormatError as error:
        assert error.errors
