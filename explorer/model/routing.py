"""The distribution of tokens over experts that a profile is run with."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bexp.explorer.model.base import Frozen, RuleError
from bexp.explorer.model.model import MAX_EXPERTS, MoESpec


class RoutingSpec(Frozen):
    """Distribution of tokens over experts.

    Every token goes to top_k distinct experts. `zipf` gives expert i a weight of 1 / (i + 1)^exponent; `shares` states
    the share of the token-expert pairs that each expert receives.
    """

    kind: Literal["uniform", "zipf", "shares"] = "uniform"
    zipf_exponent: Annotated[float, Field(gt=0, le=10)] = 1.0
    shares: Annotated[tuple[Annotated[float, Field(ge=0, le=1e9)], ...], Field(max_length=MAX_EXPERTS)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "shares") != (self.shares is not None):
            raise RuleError("shares must be given exactly when kind is 'shares'", "shares", "kind")
        if self.shares is not None and sum(self.shares) <= 0:
            raise RuleError("shares must not all be zero", "shares")
        return self

    def check(self, moe: MoESpec) -> None:
        """Check that this routing can be drawn for `moe`.

        Raises RuleError if it cannot be drawn; the fields are named as in a request.
        """
        if self.shares is None:
            return
        if len(self.shares) != moe.num_experts:
            message = f"routing.shares has {len(self.shares)} entries for {moe.num_experts} experts"
            raise RuleError(message, "routing.shares", "model.moe.num_experts")
        largest = max(self.shares) / sum(self.shares)
        if largest > 1 / moe.top_k + 1e-9:
            raise RuleError(
                f"routing.shares: a share of {largest:.4g} exceeds 1 / top_k = {1 / moe.top_k:.4g}: "
                "no expert can receive a token more than once",
                "routing.shares",
                "model.moe.top_k",
            )
        if sum(share > 0 for share in self.shares) < moe.top_k:
            message = f"routing.shares has fewer positive entries than top_k ({moe.top_k})"
            raise RuleError(message, "routing.shares", "model.moe.top_k")
