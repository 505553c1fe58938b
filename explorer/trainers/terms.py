"""The terms that a run asks of its trainer, with their words.

A trainer lists for each term the values that it can express (`Trainer.expresses`), and `Trainer.lacks` compares. Most
terms are dimensions of a candidate, and stand in their files; the others are the same for all candidates of a request.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from bexp.explorer.dimensions.candidate import DIMENSIONS
from bexp.explorer.dimensions.dimension import Term, present, unless_null
from bexp.explorer.model.training import LoRASpec, OptimizerSpec, Sharding

LORA, SINGLE_PARAMETERS, FRACTIONAL_ALPHA = "LoRA", "LoRA of single parameters", "a LoRA alpha that is no whole number"
"""Adapters; those of single parameters, such as experts in one tensor; an alpha that is no whole number."""
OTHER_LIBRARIES, ON_HOST = "of other libraries", "in the host's memory"
"""Optimizers that are not torch's AdamW and SGD; one that steps in the host's memory."""
CAPACITY = "a capacity factor of experts"
MODEL_PARALLELISM = "a mesh of devices"


class ShardedAdapters(NamedTuple):
    """Adapters in a number format of their own, and the level of sharding of the model that has them."""

    lora: LoRASpec | None
    level: Sharding


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


TERMS: Mapping[str, Term] = {
    **{dimension.name: dimension.term for dimension in DIMENSIONS if dimension.term is not None},
    "sharded_adapters": Term(
        lambda asked, lacking: f"LoRA with the sharding level '{asked.level}'",
        lambda asked: () if asked.lora is None or asked.level is Sharding.NONE else (LORA,),
        frozenset({LORA}),
    ),
    "optimizer": Term(lambda optimizer, lacking: f"the optimizer '{optimizer.name}'", _optimizer_asks),
    "adapters": Term(
        lambda lora, lacking: f"{lacking} ({lora.alpha:g})" if lacking is FRACTIONAL_ALPHA else str(lacking),
        _adapters_ask,
        frozenset({LORA, SINGLE_PARAMETERS, FRACTIONAL_ALPHA}),
    ),
    "batching": Term(lambda name, lacking: f"{name} texts", unless_null, frozenset({"padded", "grouped", "packed"})),
    "capacity_factor": Term(lambda factor, lacking: CAPACITY, present(CAPACITY)),
    "parallelism": Term(
        lambda is_shared, lacking: MODEL_PARALLELISM, lambda is_shared: (MODEL_PARALLELISM,) if is_shared else ()
    ),
}


def expresses(**others: Iterable[Hashable]) -> Mapping[str, frozenset[Hashable]]:
    """Return the values of each term that a trainer can express: those of `others`, else the usual ones.

    Raises TypeError for a name that is no term.
    """
    if unknown := others.keys() - TERMS.keys():
        raise TypeError(f"{sorted(unknown)} is nothing that a trainer can express")
    return {name: frozenset(others.get(name, term.usual)) for name, term in TERMS.items()}
