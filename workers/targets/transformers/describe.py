"""A resolved model as the search sees it: its parts, with counts that are exact and estimates that are not."""

from __future__ import annotations

from collections.abc import Mapping

from bexp.explorer.spec.candidate import Recompute
from bexp.explorer.spec.model import DType
from bexp.explorer.spec.parts import LayerPart, ModelParts, Part
from bexp.explorer.spec.target import TRANSFORMERS
from bexp.transformers.experts import expert_modules
from bexp.workers.targets.transformers.parts import KindFigures, ShellFigures
from bexp.workers.targets.transformers.resolved import ResolvedModel
from bexp.workers.targets.transformers.weight_bytes import PartWeights, WeightsByKind, add_up

GENEROUS_SAVED_WIDTHS = 34
"""Hidden widths that a layer keeps for each token where nothing better is known (Korthikanti et al., 2022)."""
LOGIT_BYTES, LOGIT_TRANSIENT_BYTES = 4, 8
"""For each logit: what the library's loss keeps, and what it holds beyond that at its peak."""


def describe_parts(
    resolved: ResolvedModel, *, tiles: str | None, checkpointing: str | None, named: Mapping[str, str | None]
) -> ModelParts:
    """The parts of a model. The arguments say why it has no tiles, checkpoints, or policies by name."""
    figures = resolved.kind_figures
    kinds = [_layer_part(resolved, each) for each in figures]
    parameters = list({id(p): p for p in resolved.model.parameters()}.values())
    sizes = [p.numel() * p.element_size() for p in parameters]
    trained = [size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad]
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
        kinds=tuple(kinds),
        shell=_shell_part(resolved.shell_figures, figures[0].hidden_bytes_per_token),
        output_bytes_per_token=figures[0].hidden_bytes_per_token,
        num_parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(sizes),
        trainable_bytes=sum(trained),
        largest_trainable_bytes=max(trained, default=0),
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


def _layer_part(resolved: ResolvedModel, figures: KindFigures) -> LayerPart:
    saved = figures.saved_bytes_per_token or GENEROUS_SAVED_WIDTHS * figures.hidden_bytes_per_token
    return LayerPart(
        name=figures.name,
        description=f"{figures.class_name}, {len(figures.indices)} times",
        has_experts=bool(expert_modules(resolved.layers[figures.indices[0]])),
        num_parameters=figures.num_parameters,
        parameter_bytes=figures.parameter_bytes,
        trainable_bytes=figures.trainable_bytes,
        flops_per_token=figures.flops_per_token,
        flops_per_sequence=figures.attention_flops_per_token * resolved.config.seq_length,
        saved_bytes_per_token=saved,
        transient_bytes_per_token=saved / 2,
    )


def _shell_part(figures: ShellFigures, hidden_bytes_per_token: int) -> Part:
    return Part(
        num_parameters=figures.num_parameters,
        parameter_bytes=figures.parameter_bytes,
        trainable_bytes=figures.trainable_bytes,
        flops_per_token=figures.flops_per_token,
        saved_bytes_per_token=LOGIT_BYTES * figures.vocab_size + 4 * hidden_bytes_per_token,
        transient_bytes_per_token=LOGIT_TRANSIENT_BYTES * figures.vocab_size,
    )
