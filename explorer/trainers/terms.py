"""The terms that a run asks of its trainer, with their words; they stand here alone.

A trainer lists for each term the values that it can express (`Trainer.expresses`), and `Trainer.lacks` compares. Most
terms are dimensions of a candidate, under their names; the others are the same for all candidates of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bexp.explorer.dimensions.candidate import CHOICES, DIMENSIONS
from bexp.explorer.dimensions.context_parallel import Sharing
from bexp.explorer.dimensions.dimension import Choice
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.training import LoRASpec, OptimizerSpec, Sharding
from bexp.explorer.trainers.back_ends import TORCH_CHOICE, library_experts

SHARES = frozenset({Recompute.PARTIAL_25, Recompute.PARTIAL_50, Recompute.PARTIAL_75})
FIRST_LAYERS, LAYER_GROUPS = "layers_N", "groups_N"
"""The policies with a number, for any number."""
DIFFERENT_LAYERS = "a share of layers that differ"
"""The first layers are measured. A trainer that recomputes every Nth does the same where all layers are of one kind."""
TILES = "attention tiles"
LORA, SINGLE_PARAMETERS, FRACTIONAL_ALPHA = "LoRA", "LoRA of single parameters", "a LoRA alpha that is no whole number"
"""Adapters; those of single parameters, such as experts in one tensor; an alpha that is no whole number."""
OTHER_LIBRARIES, ON_HOST = "of other libraries", "in the host's memory"
"""Optimizers that are not torch's AdamW and SGD; one that steps in the host's memory."""
CAPACITY = "a capacity factor of experts"
MODEL_PARALLELISM = "a mesh of devices"


class Policy(NamedTuple):
    """A recomputation policy of a model whose layers may be of several kinds."""

    policy: Recompute
    layers_differ: bool = False


class ShardedAdapters(NamedTuple):
    """Adapters in a number format of their own, and the level of sharding of the model that has them."""

    lora: LoRASpec | None
    level: Sharding


@dataclass(frozen=True, slots=True)
class Term:
    """One thing that a run may ask of its trainer."""

    words: Callable[[Any, Hashable], str]
    """Returns the words for a value; the second argument is the part that the trainer cannot express."""
    asks: Callable[[Any], Iterable[Hashable]] = lambda value: (value,)
    """Returns the parts that a trainer has to express for a value."""
    usual: frozenset[Hashable] = frozenset()
    """The parts that a trainer can express if it lists nothing for this term."""


def _policy_asks(asked: Policy) -> Iterable[Hashable]:
    if asked.policy.is_numbered:
        yield LAYER_GROUPS if asked.policy.first_layers is None else FIRST_LAYERS
    else:
        yield asked.policy
    if asked.layers_differ and asked.policy in SHARES:
        yield DIFFERENT_LAYERS


def _adapters_ask(lora: LoRASpec | None) -> Iterable[Hashable]:
    if lora is not None:
        yield LORA
        if lora.target_parameters is not None:
            yield SINGLE_PARAMETERS
        if not float(lora.alpha or lora.r).is_integer():
            yield FRACTIONAL_ALPHA


def _optimizer_asks(optimizer: OptimizerSpec) -> Iterable[Hashable]:
    if (known := optimizer.of_library) is not None:
        yield ON_HOST if known.is_on_host else OTHER_LIBRARIES


def _sharing_words(sharing: Sharing, lacking: Hashable) -> str:
    return f"{sharing.size} devices that share each sequence in layout '{sharing.layout}'"


def _present(word: str) -> Callable[[Any], Iterable[Hashable]]:
    """Return a function that asks for `word` unless a value is None."""
    return lambda value: () if value is None else (word,)


def _named(value: Any) -> Iterable[Hashable]:
    """Ask for a value; None is left to the trainer."""
    return () if value is None else (value,)


def _of(choice: Choice[Any]) -> Term:
    """Return the term of a dimension whose values have names: a trainer that lists none has the plain one."""
    return Term(lambda value, lacking: choice.words(value), _named, frozenset({choice.plain}))


TERMS: Mapping[str, Term] = {
    **{choice.name: _of(choice) for choice in CHOICES},
    "bta_tile": Term(lambda tile, lacking: TILES if tile is True else f"{TILES} of {tile} sequences", _present(TILES)),
    "recompute": Term(
        lambda asked, lacking: (
            f"the recomputation policy '{asked.policy}'"
            f"{' of layers that differ' if lacking is DIFFERENT_LAYERS else ''}"
        ),
        _policy_asks,
        frozenset({Recompute.NONE, Recompute.FULL}),
    ),
    "attention": Term(
        lambda name, lacking: f"the attention kernel '{name}'",
        lambda name: _named(name and name.removeprefix(f"{TORCH_CHOICE}:")),
        frozenset({TORCH_CHOICE}),
    ),
    "experts": Term(
        lambda name, lacking: f"the expert kernels '{name}'",
        lambda name: _named(name and library_experts(name)),
        frozenset({"grouped_mm"}),
    ),
    "sharding": Term(
        lambda level, lacking: f"the sharding level '{level}'",
        usual=frozenset({Sharding.NONE, Sharding.ZERO2, Sharding.ZERO3}),
    ),
    "sharded_adapters": Term(
        lambda asked, lacking: f"LoRA with the sharding level '{asked.level}'",
        lambda asked: () if asked.lora is None or asked.level is Sharding.NONE else (LORA,),
        frozenset({LORA}),
    ),
    "context_parallel": Term(_sharing_words, lambda sharing: _named(sharing.layout)),
    "optimizer": Term(lambda optimizer, lacking: f"the optimizer '{optimizer.name}'", _optimizer_asks),
    "adapters": Term(
        lambda lora, lacking: f"{lacking} ({lora.alpha:g})" if lacking is FRACTIONAL_ALPHA else str(lacking),
        _adapters_ask,
        frozenset({LORA, SINGLE_PARAMETERS, FRACTIONAL_ALPHA}),
    ),
    "batching": Term(lambda batching, lacking: f"{batching} texts", _named, frozenset({"padded", "grouped", "packed"})),
    "capacity_factor": Term(lambda factor, lacking: CAPACITY, _present(CAPACITY)),
    "parallelism": Term(
        lambda is_shared, lacking: MODEL_PARALLELISM, lambda is_shared: (MODEL_PARALLELISM,) if is_shared else ()
    ),
}
ALWAYS = frozenset({"micro_batch_size", "settings"})
"""Dimensions that every trainer can express, or that are the target's own."""
if unknown := {dimension.name for dimension in DIMENSIONS} - TERMS.keys() - ALWAYS:
    raise TypeError(f"no trainer says what it can express of {sorted(unknown)}")


def expresses(**others: Iterable[Hashable]) -> Mapping[str, frozenset[Hashable]]:
    """Return the values of each term that a trainer can express: those of `others`, else the usual ones.

    Raises TypeError for a name that is no term.
    """
    if unknown := others.keys() - TERMS.keys():
        raise TypeError(f"{sorted(unknown)} is nothing that a trainer can express")
    return {name: frozenset(others.get(name, term.usual)) for name, term in TERMS.items()}
