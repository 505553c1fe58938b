"""Alternatives to a recommended candidate, and answers with others than theirs."""

from __future__ import annotations

from typing import Any

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.records.recommendation import Alternative, Recommendation, Role


def alternative(role: Role, of: Candidate, **changes: Any) -> Alternative:
    """Return a candidate with a role; it is as fast as the recommended one unless that is changed."""
    figures = {"tokens_per_second": 1.0, "composed_tokens_per_second": 1.0, "ratio": 1.0, "grad_accum_steps": None}
    figures |= {"measured_peak_bytes": 1, "required_bytes": 1}
    return Alternative.model_validate({"role": role, "candidate": of, **figures, **changes})


def with_alternatives(best: Recommendation, *others: Alternative, **changes: Any) -> Recommendation:
    """Return a recommendation with these alternatives in the place of those with the same roles."""
    return without(best, *(other.role for other in others), added=others, **changes)


def without(best: Recommendation, *roles: Role, added: tuple[Alternative, ...] = (), **changes: Any) -> Recommendation:
    """Return a recommendation without the alternatives with these roles."""
    kept = (other for other in best.alternatives if other.role not in roles)
    return best.model_copy(update={"alternatives": (*kept, *added), **changes})


def other_of(best: Recommendation, role: Role) -> Alternative:
    """Return the alternative with a role, which is there."""
    found = best.alternative(role)
    assert found is not None, role
    return found
