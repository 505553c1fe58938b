"""The check whether the host's memory can hold a trial's activations."""

from __future__ import annotations

import torch

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.part_costs import part_of
from bexp.explorer.cost.step import GIB
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.records.measurement import Outcome
from bexp.measure import host_limits
from bexp.workers.instruments.failures import TrialFailedError
from bexp.workers.targets.transformers.passes import LayerPasses


def require_host_memory(passes: LayerPasses, component: Component, model: ExploredModel) -> None:
    """Run a layer forward, and check that the host could hold the activations of all layers.

    Layers of other kinds count in proportion to their expected bytes.

    Raises:
        TrialFailedError: the host could not hold them; the outcome is a lack of memory.
    """
    assert isinstance(model, ModelParts), "this target describes its model by its parts"
    passes.prepare_forward()
    passes.forward()
    taken = passes.host_bytes
    passes.release()
    expected = sum(model.kind(name).saved_bytes_per_token for name in model.layers)
    full = full_host(round(taken * expected / part_of(component, model).saved_bytes_per_token), "the activations need")
    if full is not None:
        raise TrialFailedError(Outcome.OUT_OF_MEMORY, full)


def full_host(num_bytes: int, need: str) -> str | None:
    """Return why `num_bytes` do not fit in the host's memory, in words that begin with `need`; None if they do."""
    release = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.11 has none
    if release is not None and torch.accelerator.is_available():
        release()  # memory that earlier trials pinned
    free = host_limits.available_bytes()
    if num_bytes <= free:
        return None
    return f"{need} {num_bytes / GIB:.2f} GiB of the host's memory, of which {free / GIB:.2f} GiB are free"
