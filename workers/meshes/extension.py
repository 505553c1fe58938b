"""The interface of meshes to the profiler. Only `bexp.workers.targets.extensions` names this module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.meshes.mesh import MeshRun
from bexp.explorer.meshes.shards import is_shard, shard_of
from bexp.workers.meshes.blocks import build_shard
from bexp.workers.meshes.exchange import measure_exchange
from bexp.workers.meshes.whole_model import run_whole_model

if TYPE_CHECKING:
    from bexp.explorer.records.trial import TrialTask

__all__ = ["build_shard", "measure_exchange", "run_whole_model", "serves", "shard_of"]


def serves(subject: Component | TrialTask) -> bool:
    """Return whether a component is a shard or an exchange, or a task is a whole model on a mesh."""
    if isinstance(subject, Component):
        return subject.kind is ComponentKind.EXCHANGE or is_shard(subject)
    return isinstance(subject.shared_run, MeshRun)
