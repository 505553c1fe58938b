"""The layers that have experts, as the two numbers of a ModelSpec."""

from __future__ import annotations

from collections.abc import Sequence


def find_layer_pattern(has_experts: Sequence[bool]) -> tuple[int, int] | None:
    """Return the (first_k_dense, moe_layer_frequency) that describe the layers, or None if no such pair does.

    A layer i has experts when i >= first_k_dense and (i - first_k_dense + 1) is a multiple of moe_layer_frequency.
    """
    count = len(has_experts)
    experts = [i for i, moe in enumerate(has_experts) if moe]
    if not experts:
        return count, 1
    following = experts[1] if len(experts) > 1 else count
    frequency = 1 if experts[0] == count - 1 else following - experts[0]
    first = experts[0] - frequency + 1
    described = [i >= first and (i - first + 1) % frequency == 0 for i in range(count)]
    return (first, frequency) if first >= 0 and described == list(has_experts) else None
