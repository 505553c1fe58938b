"""A resolved model as the search sees it: its parts, with counts that are exact and estimates that are not."""

from __future__ import annotations

from collections.abc import Mapping

from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.model import DType
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.model.target import TRANSFORMERS
from bexp.workers.targets.transformers.parts import num_bytes
from bexp.workers.targets.transformers.resolved import ResolvedModel
from bexp.workers.targets.transformers.weight_bytes import PartWeights, WeightsByKind, add_up


def describe_parts(
    resolved: ResolvedModel, *, tiles: str | None, checkpointing: str | None, named: Mapping[str, str | None]
) -> ModelParts:
    """The parts of a model. The arguments say why it has no tiles, checkpoints, or policies by name."""
    parameters = list({id(p): p for p in resolved.model.parameters()}.values())
    policies = [Recompute.NONE]
    if checkpointing is None:
        policies += [policy for policy in Recompute if policy.layer_share > 0]
    policies += [Recompute(name) for name, reason in named.items() if reason is None]
    refused = {"tiles": tiles, "checkpointing": checkpointing, **named}
    return ModelParts(
        target=TRANSFORMERS,
        target_version=resolved.config.version,
        name=resolved.config.model_type,
        class_name=resolved.config.model_class.__name__,
        dtype=DType.BFLOAT16,
        seq_length=resolved.config.seq_length,
        layers=resolved.kinds,
        kinds=resolved.layer_parts,
        shell=resolved.shell_part,
        output_bytes_per_token=resolved.hidden_bytes_per_token,
        num_parameters=sum(p.numel() for p in parameters),
        parameter_bytes=num_bytes(parameters),
        trainable_bytes=num_bytes(p for p in parameters if p.requires_grad),
        policies=tuple(policies),
        tiles=tiles is None,
        unavailable={name: reason for name, reason in refused.items() if reason is not None},
    )


def with_quantized_weights(parts: ModelParts, found: PartWeights) -> ModelParts:
    """The parts with the bytes that quantised weights really have."""
    kinds = [kind.model_copy(update={"parameter_bytes": _total(found.layers[kind.name])}) for kind in parts.kinds]
    weights = add_up([(1, found.shell), *((parts.layers.count(name), layer) for name, layer in found.layers.items())])
    return parts.model_copy(
        update={
            "kinds": tuple(kinds),
            "shell": parts.shell.model_copy(update={"parameter_bytes": _total(found.shell)}),
            "parameter_bytes": sum(one.num_bytes for one in weights),
            "weights": weights,
        }
    )


def _total(weights: WeightsByKind) -> int:
    return sum(one.num_bytes for one in weights.values())
