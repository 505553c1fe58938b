"""The legal space: every candidate that a request admits on a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from explorer.candidates import Candidate, Recompute
from explorer.hardware import BackendSupport, DeviceReport
from explorer.models import ModelSpec
from explorer.requests import ExplorationRequest


class EmptySpaceError(ValueError):
    """The request admits no candidate on this device; the message says which dimension is empty and why."""


@dataclass(frozen=True, slots=True)
class LegalSpace:
    """The enumeration for one model variant, in ascending order of micro-batch size."""

    model: ModelSpec
    candidates: tuple[Candidate, ...]

    def restrict(self, candidates: Iterable[Candidate]) -> LegalSpace:
        """The same model with fewer candidates."""
        return LegalSpace(self.model, tuple(candidates))

    def summarize(self) -> dict[str, Any]:
        """The values of each dimension and the number of candidates, as stored with the job."""

        def values(name: str) -> list[Any]:
            found = {getattr(candidate, name) for candidate in self.candidates}
            return sorted(found, key=lambda value: (value is not None, value))

        return {
            "num_query_groups": self.model.query_groups,
            "num_candidates": len(self.candidates),
            "micro_batch_size": values("micro_batch_size"),
            "bta_tile": values("bta_tile"),
            "recompute": [p.value for p in Recompute if any(c.recompute is p for c in self.candidates)],
            "attention_backend": values("attention_backend"),
            "expert_backend": values("expert_backend"),
        }


def enumerate_candidates(request: ExplorationRequest, report: DeviceReport, model: ModelSpec) -> LegalSpace:
    """All legal candidates of one variant, whether or not they fit the memory.

    Tiling with a policy that says what of attention is kept is left out: a tile recomputes its attention already. Eval
    mode has no recomputation at all.

    Raises:
        EmptySpaceError: a restriction leaves a dimension empty on this device.
    """
    attention = _usable("attention back end", report.attention_backends, request.attention_backends)
    if not request.flash_attention:
        attention = [name for name in attention if name != "flash"]
        if not attention:
            raise EmptySpaceError("no attention back end is left on this device once flash is excluded")
    experts: list[str] | list[None] = [None]
    if model.moe is not None:
        experts = _usable("expert back end", report.expert_backends, request.expert_backends)
    candidates = []
    for m in request.micro_batch_sizes:
        for tile in request.tiles_for(m):
            for recompute in request.policies_for(tile):
                for attention_backend, expert_backend in product(attention, experts):
                    candidates.append(
                        Candidate(
                            micro_batch_size=m,
                            bta_tile=tile,
                            recompute=recompute,
                            attention_backend=attention_backend,
                            expert_backend=expert_backend,
                            num_query_groups=model.query_groups,
                        )
                    )
    if not candidates:
        raise EmptySpaceError(
            "tiling with policies that keep a part of attention only: a tile recomputes attention already"
        )
    return LegalSpace(model, tuple(candidates))


def base_candidates(request: ExplorationRequest, report: DeviceReport, model: ModelSpec) -> tuple[Candidate, ...]:
    """What 1.00x may mean, in order of preference: the first that fits is the base.

    The smallest legal micro-batch (or the requested one) with torch's default attention and the default expert back
    end, untiled, without recomputation; then with selective, then with full recomputation.
    """
    policies = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL) if request.mode == "train" else (Recompute.NONE,)
    return tuple(
        Candidate(
            micro_batch_size=request.base_micro_batch_size or min(request.micro_batch_sizes),
            recompute=recompute,
            attention_backend=report.default_attention,
            expert_backend=report.default_experts if model.moe is not None else None,
            num_query_groups=model.query_groups,
        )
        for recompute in policies
    )


def _usable(what: str, supported: tuple[BackendSupport, ...], allowed: tuple[str, ...] | None) -> list[str]:
    usable = [backend.name for backend in supported if backend.usable]
    if allowed is None:
        names = usable
    else:
        known = {backend.name: backend for backend in supported}
        for name in allowed:
            if name not in known:
                raise EmptySpaceError(f"unknown {what} '{name}'; this device has {', '.join(sorted(known))}")
        names = [name for name in usable if name in allowed]
    if not names:
        asked = [b for b in supported if allowed is None or b.name in allowed]
        reasons = "; ".join(f"{b.name}: {b.reason}" for b in asked)
        raise EmptySpaceError(f"no usable {what} on this device ({reasons})")
    return names
