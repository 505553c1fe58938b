"""Subjects of components: equal subjects say that the time of one request's component serves another request.

A subject is a hash of all that an equal component's time depends on, except the hardware and the versions of libraries.
That is the shapes, number formats and code of its part of the model, the training, the routing, the lengths of texts
and the allocator. Names of people and models are left out. Fields that are not known to be irrelevant count. So a new
field of a model or of a request keeps components apart until it is listed here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from bexp.explorer.cost.collectives import is_communication_timed
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.dimensions.candidate import DimensionsAsked
from bexp.explorer.model.lengths import PACKED
from bexp.explorer.model.model import ModelSpec
from bexp.explorer.model.parts import LayerPart, ModelParts
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest

Subject = tuple[ComponentKind, str | None]
"""A kind of component, and the kind of layer that it stands for, if any."""

OF_THE_SEARCH = frozenset(
    {
        *DimensionsAsked.model_fields,  # components and candidates name what they have of a dimension
        "batch_size",
        *("memory_limit_gib", "headroom", "base_micro_batch_size", "tolerance", "prefer", "budget", "verify", "seed"),
        *("sampler", "fresh", "notices", "labels", "kept", "device_kind", "trainer", "quick"),
    }
)
"""Fields of a request that say what is searched for and how, and not what a candidate trains."""
IRRELEVANT = OF_THE_SEARCH | {"target", "model", "hf_config", "num_devices", "training"}
"""Fields of a request that a component's time does not depend on, or that `component_subjects` treats by itself."""

_ATTENTION_FIELDS = {
    *("num_attention_heads", "head_dim", "rotary_fraction", "qkv_bias", "attention_output_bias", "qk_norm")
}
_FFN_FIELDS = {"ffn_hidden_size", "gated_mlp", "activation", "mlp_bias"}
_VOCABULARY_FIELDS = {"vocab_size", "tie_embeddings", "lm_head_bias"}
_POSITION_FIELDS = {"position", "max_position_embeddings"}
_EVERYWHERE = {"name", "num_query_groups"}
_MODEL_IRRELEVANT: Mapping[ComponentKind, set[str]] = {
    ComponentKind.EMBEDDING: {"num_layers", "moe", *_ATTENTION_FIELDS, *_FFN_FIELDS},
    ComponentKind.ATTENTION: {"num_layers", "moe", *_FFN_FIELDS, *_VOCABULARY_FIELDS},
    ComponentKind.DENSE_FFN: {"num_layers", "moe", *_ATTENTION_FIELDS, *_POSITION_FIELDS, *_VOCABULARY_FIELDS},
    ComponentKind.MOE_FFN: {
        *("num_layers", "ffn_hidden_size"),
        *_ATTENTION_FIELDS,
        *_POSITION_FIELDS,
        *_VOCABULARY_FIELDS,
    },
    ComponentKind.HEAD: {"num_layers", "moe", *_ATTENTION_FIELDS, *_FFN_FIELDS, *_POSITION_FIELDS},
    ComponentKind.OPTIMIZER: set(),
}
"""Fields of a ModelSpec that a kind of component does not depend on.

A component itself names its query groups and capacity factor.
"""
_MOE_PLACES = ("first_k_dense", "moe_layer_frequency")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_CONFIG_NAMES = ("_name_or_path", "transformers_version")


def component_subjects(request: ExplorationRequest, report: DeviceReport) -> dict[Subject, str]:
    """Return the subject of every kind of component of a request's model.

    It is empty for a target that somebody has written, because its code can change while its version does not.
    """
    if request.is_own_code or (request.model is None and report.parts is None):
        return {}
    if report.parts is None:
        kinds: list[Subject] = [(kind, None) for kind in _MODEL_IRRELEVANT]
    else:
        kinds = [(ComponentKind.LAYER, part.name) for part in report.parts.kinds]
        kinds += [(ComponentKind.SHELL, None), (ComponentKind.OPTIMIZER, None)]
    described = {(kind, part): _describe(kind, part, request, report) for kind, part in kinds}
    texts = {subject: json.dumps(document, sort_keys=True) for subject, document in described.items()}
    return {subject: hashlib.sha256(text.encode()).hexdigest()[:32] for subject, text in texts.items()}


def subject_of(component: Component, subjects: Mapping[Subject, str]) -> str | None:
    """Return the subject of a component; None for one that several devices measure together, whose links matter."""
    return None if component.is_joint else subjects.get((component.kind, component.part))


def _describe(kind: ComponentKind, part: str | None, request: ExplorationRequest, report: DeviceReport) -> Any:
    steps = kind is ComponentKind.OPTIMIZER
    training = request.training.model_dump(mode="json", exclude=set() if steps else {"sharding"})
    if request.training.keeps_master_weights and not steps:
        training["precision"] = "pure"  # the optimizer alone knows the master weights
    compiled = request.plain_execution.compiles  # where executions are chosen, components say which are compiled
    document = request.model_dump(mode="json", exclude=set(IRRELEVANT))
    document |= {
        "kind": kind.value,
        "target": request.target_name,
        "training": training,
        "compiled": compiled,
        "num_processes": request.num_devices if is_communication_timed(request, report.hardware) else 1,
        "num_devices": request.num_devices if steps else None,
    }
    if request.batching in PACKED:
        document["flattened"] = request.flattens
    if report.parts is None:
        return document | {"model": _describe_spec(kind, request.shapes)}
    return document | {"model": _describe_parts(kind, part, report.parts, request.hf_config or {})}


def _describe_spec(kind: ComponentKind, model: ModelSpec) -> dict[str, Any]:
    document = model.model_dump(mode="json", exclude=_EVERYWHERE | _MODEL_IRRELEVANT[kind])
    if document.get("moe") is not None:
        unrelated = {"capacity_factor", *(_MOE_PLACES if kind is ComponentKind.MOE_FFN else ())}
        document["moe"] = {name: value for name, value in document["moe"].items() if name not in unrelated}
    return document


def _describe_parts(
    kind: ComponentKind, name: str | None, parts: ModelParts, config: Mapping[str, Any]
) -> dict[str, Any]:
    known = {name: value for name, value in config.items() if name not in _CONFIG_NAMES}
    document: dict[str, Any] = {"class": parts.class_name, "dtype": parts.dtype.value}
    if kind is ComponentKind.OPTIMIZER:
        return document | {"config": known}
    part = parts.shell if name is None else parts.kind(name)
    # A kind with a number is known by its place in this very model, and experts get hidden states of its typical depth.
    is_placed = "#" in (name or "") or (isinstance(part, LayerPart) and part.has_experts)
    if not is_placed:
        known = {name: value for name, value in known.items() if name not in _LAYER_COUNTS}
        if isinstance(types := known.get("layer_types"), list):
            known["layer_types"] = sorted({str(one) for one in types})
    return document | {"config": known, "name": name, "part": part.model_dump(mode="json", exclude={"description"})}
