"""The meshes that may be the best, given the errors of the parts that their steps are composed of."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bexp.explorer.cost.components import Component
from bexp.explorer.meshes.step import MeshStep

NUM_SAMPLES = 512
EXCHANGE_ERROR = 0.05
"""Expected relative error of what devices exchange, which is measured by itself."""
COMPOSITION_ERROR = 0.01
"""Expected relative error of a candidate's composed step, in addition to those of its parts."""

HOST_ERROR = 0.12
"""The same where the host sets the pace, which varies between processes that issue the same operations.

Composed steps of GPT-2 124M on two H100s are 0.3 to 18% apart from whole ones, 12% in the mean square
(benchmarks/results/h100x2-mesh-fidelity.json).
"""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Expected:
    """The ratio of a step's expected seconds to its composed ones, and the relative error of that ratio.

    `is_own` says that a whole model of this very candidate shows the ratio, so that the errors of its parts do not
    matter.
    """

    factor: float = 1.0
    error: float = COMPOSITION_ERROR
    is_own: bool = False


def sample_throughput(
    steps: Sequence[MeshStep], error: Callable[[Component], float], seed: int, expected: Sequence[Expected]
) -> Floats:
    """Return samples of the tokens/s of each step, shape (samples, steps).

    The errors of a component, or of exchanges, are common to all steps that contain them. A step's seconds are taken as
    linear in those of its parts.
    """
    parts = list(dict.fromkeys(part for step in steps for part in step.makeup))
    place = {part: i for i, part in enumerate(parts)}
    shares_SP = np.zeros((len(steps), len(parts)))
    for i, step in enumerate(steps):
        for part, share in step.makeup.items():
            shares_SP[i, place[part]] = share
    errors_P = np.array([EXCHANGE_ERROR if part is None else error(part) for part in parts])
    factors_NP = np.exp(errors_P * np.stack([_noise(part, seed) for part in parts], axis=1))
    rng = np.random.default_rng(seed)
    errors_S = np.array(
        [
            math.hypot(one.error, HOST_ERROR) if step.host_bound and not one.is_own else one.error
            for step, one in zip(steps, expected, strict=True)
        ]
    )
    composed_NS = np.exp(errors_S * rng.standard_normal((NUM_SAMPLES, len(steps))))
    rates_S = np.array([step.tokens_per_second / one.factor for step, one in zip(steps, expected, strict=True)])
    own_S = np.array([one.is_own for one in expected])
    parts_NS = np.where(own_S, 1.0, factors_NP @ shares_SP.T)
    return np.asarray(rates_S / (parts_NS * composed_NS))


def _noise(part: Component | None, seed: int) -> Floats:
    """Return the standard normal errors of a part, which are the same in each round of a search."""
    name = "devices" if part is None else part.key
    return np.random.default_rng((seed, zlib.crc32(name.encode()))).standard_normal(NUM_SAMPLES)
