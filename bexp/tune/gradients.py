"""Gradients of one global batch, small enough to be kept and compared: exact norms, and an even sample of the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

SAMPLED = 1 << 22
"""About so many elements of a gradient are kept. A gradient with fewer is kept whole."""
FEWEST_OF_A_PARAMETER = 256
LEAST_SHARE = 1e-4
"""Kinds of weights with a smaller share of the norm are not compared by themselves."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of all trained parameters. `kinds` joins the gradients of the same weights of all layers."""

    norm: float
    kinds: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module, divisor: float = 1.0) -> Gradient:
        """Return the present gradients, divided; a parameter without a gradient has zeros."""
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        most = max(FEWEST_OF_A_PARAMETER, SAMPLED // max(1, len(trained)))
        squares, kinds = 0.0, dict[str, list[torch.Tensor]]()
        for name, parameter in trained:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            squares += float(torch.linalg.vector_norm(gradient, dtype=torch.float32)) ** 2
            kinds.setdefault(kind_of(name), []).append(_sampled(gradient, most))
        found = {kind: torch.cat(parts) / divisor for kind, parts in kinds.items()}
        return cls(math.sqrt(squares) / divisor, found)

    @property
    def is_finite(self) -> bool:
        """Whether all of it is a number."""
        return math.isfinite(self.norm)

    def __sub__(self, other: Gradient) -> Gradient:
        return self._combined([1.0, -1.0], [self, other])

    def __mul__(self, factor: float) -> Gradient:
        return self._combined([factor], [self])

    @classmethod
    def weighted(cls, weights: Sequence[float], gradients: Sequence[Gradient]) -> Gradient:
        """The sum of gradients, each times its weight."""
        return cls._combined(weights, gradients)

    @classmethod
    def _combined(cls, weights: Sequence[float], gradients: Sequence[Gradient]) -> Gradient:
        kinds = {
            kind: sum((weight * each.kinds[kind] for weight, each in zip(weights, gradients, strict=True)), _ZERO)
            for kind in gradients[0].kinds
        }
        return cls(math.sqrt(sum(float(vector.square().sum()) for vector in kinds.values())), kinds)

    def dot(self, other: Gradient) -> float:
        """The scalar product with another gradient."""
        products = (vector.double() @ other.kinds[kind].double() for kind, vector in self.kinds.items())
        return float(sum(map(float, products)))


_ZERO = torch.zeros(())


def kind_of(name: str) -> str:
    """The name of a parameter without the numbers of layers and experts."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def difference(first: Gradient, second: Gradient) -> float:
    """The norm of the difference of two gradients, as a share of the first one's."""
    return (first - second).norm / max(first.norm, 1e-30)


def cosine(first: Gradient, second: Gradient) -> float:
    """The cosine of the angle between two gradients."""
    lengths = math.sqrt(first.dot(first) * second.dot(second))
    return min(1.0, first.dot(second) / lengths) if lengths else 0.0


def differences_by_kind(first: Gradient, second: Gradient) -> dict[str, float]:
    """The difference of each kind of weights that is large enough to be judged, as a share of the first one's norm."""
    whole = math.sqrt(first.dot(first))
    found = {}
    for kind, vector in first.kinds.items():
        norm = float(torch.linalg.vector_norm(vector))
        if vector.numel() >= FEWEST_OF_A_PARAMETER and norm > LEAST_SHARE * whole:
            found[kind] = float(torch.linalg.vector_norm(vector - second.kinds[kind])) / norm
    return found


def best_weights(target: Gradient, parts: Sequence[Gradient]) -> list[float]:
    """The weights with which the sum of `parts` is nearest to `target`."""
    products = torch.tensor([[first.dot(second) for second in parts] for first in parts], dtype=torch.float64)
    aims = torch.tensor([[part.dot(target)] for part in parts], dtype=torch.float64)
    found: list[float] = torch.linalg.lstsq(products, aims, driver="gelsd").solution[:, 0].tolist()
    return found


def steps_of(cumulative: Iterable[Gradient]) -> list[Gradient]:
    """The addend of each micro-batch, from the gradients after each of them."""
    found = list(cumulative)
    return found[:1] + [later - earlier for earlier, later in pairwise(found)]


def _sampled(gradient: torch.Tensor, most: int) -> torch.Tensor:
    """An even sample of a gradient in float32 on the CPU, whose norm stands for that of the whole."""
    flat = gradient.reshape(-1)
    stride = -(-flat.numel() // most) | 1 if flat.numel() > most else 1  # odd: a row's length is even
    sample = flat[::stride].float().cpu()
    return sample * math.sqrt(flat.numel() / max(1, sample.numel())) if stride > 1 else sample
