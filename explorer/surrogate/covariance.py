"""The prior covariance of the distances of components of one kind from the roofline.

A distance is the logarithm of real over roofline seconds. It is a sum of independent parts:

- an offset of the kind, one of the back end, and one of each recomputation mode, at any size; the back end of a whole
  layer has one for its attention, one for its experts, and hardly any of the two together;
- the share that a fixed cost (launches, tails, small tiles) has in a block of n sequences, log(1 + r / n), for a few r,
  most of which all back ends have in common, because only a part of a block's kernels is the back end's;
- in a model that is measured whole, wide shares of larger fixed costs, because the step includes the host's seconds;
- a smooth curve over the number of sequences that a kernel sees at once, of unknown amplitude;
- if small operations are fused, by the compiler or by liger's kernels, an offset of all such components, one of the way
  of fusing, one of the back end, and fixed costs of their own;
- if devices share sequences, an offset of the layout and the number of devices, and another curve of the same
  amplitude, because such a block waits for traffic and merges partial results;
- a part that is specific to each component (wave quantisation, an algorithm chosen for one size), of unknown size.

Widths are log-space standard deviations, lengths are octaves. They rest on 167 component times of four models on an
H200, embeddings left out (benchmarks/results/h200-explorations.json and h200-olmoe-fused.json). Among ninety
combinations, these are within a few units of the highest marginal likelihood with the hyperparameters summed out.
The widths of whole layers and of fused code rest on 93 more times of four models of the library on an H100
(benchmarks/results/h100-default-explorations.json).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bexp.explorer.cost.back_end import BackEnd
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Floats

KIND_STD = 0.7
BACKEND_STD = 0.35
LAYER_ATTENTION_STD, LAYER_EXPERTS_STD = 0.1, 0.25
TOGETHER_STD = 0.01  # the joint part of attention and experts of a layer, in addition to the part of each
MODE_STD = 0.04
MODE_LENGTH = 4.0
SHARING_STD = 0.3
FIXED_COSTS = {0.1: 0.3, 0.5: 0.3, 3.0: 0.1}  # a fixed cost in sequences of work: the width of its share
WHOLE_FIXED = {3.0: 1.0, 30.0: 1.0}
"""The additional fixed costs of a whole step. GPT-2 in a plain loop on an H100 ran 5.8 times as fast at 16 sequences
as at one."""
BACKEND_FIXED = 0.5  # the width of a back end's own fixed costs, over that of those in common
CURVE_LENGTH = 2.0
FUSED_STD = 0.35  # what fused operations gain, which all components of a kind have in common
FUSED_OWN_STD = 0.06  # what one way to fuse them gains over another
FUSED_BACKEND_STD = 0.04
FUSED_FIXED = 0.2  # the width of fused code's own fixed costs, over that of those in common
FUSED_ALIKE = 0.9  # the correlation between the curves of code that is fused in different ways, or not at all


@dataclass(frozen=True, slots=True)
class Covariance:
    """The covariance of K components, `level + amplitude^2 curve + own^2 identity`, for any hyperparameters."""

    level: Floats
    curve: Floats

    @classmethod
    def of(cls, components: Sequence[Component], *, is_whole: bool = False) -> Covariance:
        """Return the covariance of components of one kind, or of whole steps."""
        backends = [c.backend or BackEnd() for c in components]
        backend, alike_fused = _equal([b.unmarked for b in backends]), _equal([b.marks for b in backends])
        fused = np.array([c.is_fused for c in components], dtype=np.float64)
        mode = _equal([(c.recompute, c.bta_tile is not None) for c in components])
        size = np.array([c.context_parallel_size for c in components], dtype=np.float64)
        at_once = np.array([max(c.bta_tile or c.micro_batch_size, 1) for c in components], dtype=np.float64) / size
        batch = np.array([max(c.micro_batch_size, 1) for c in components], dtype=np.float64) / size
        sharings = [(c.context_parallel_layout, c.context_parallel_size if c.communicates else 1) for c in components]
        alike, shares_any = _equal(sharings), np.array([c.communicates for c in components])
        similar = _smooth(at_once, MODE_LENGTH) * _smooth(batch, MODE_LENGTH)
        costs = [*FIXED_COSTS.items(), *(WHOLE_FIXED.items() if is_whole else ())]
        shares = [std * np.log1p(cost / at_once) for cost, std in costs]
        fixed = sum(np.outer(share, share) for share in shares)
        level = KIND_STD**2 + fixed * (1.0 + BACKEND_FIXED**2 * backend)
        level += backend * MODE_STD**2 * mode * 0.5 * (1.0 + similar)
        if components[0].kind is ComponentKind.LAYER:
            level += LAYER_ATTENTION_STD**2 * _equal([b.attention for b in backends])
            level += LAYER_EXPERTS_STD**2 * _equal([b.experts for b in backends]) + TOGETHER_STD**2 * backend
        else:
            level += BACKEND_STD**2 * backend
        own = FUSED_OWN_STD**2 * alike_fused + FUSED_BACKEND_STD**2 * backend + FUSED_FIXED**2 * fixed
        level += np.outer(fused, fused) * (FUSED_STD**2 + own)
        level += SHARING_STD**2 * alike * backend * np.outer(shares_any, shares_any)
        curve = alike * backend * _smooth(at_once, CURVE_LENGTH) * np.where(alike_fused, 1.0, FUSED_ALIKE)
        return cls(np.asarray(level), np.asarray(curve))

    def restrict(self, rows: Sequence[int]) -> Covariance:
        """Return the covariance of some of the components."""
        return Covariance(self.level[np.ix_(rows, rows)], self.curve[np.ix_(rows, rows)])


def _equal(values: Sequence[object]) -> Floats:
    codes = np.unique([str(v) for v in values], return_inverse=True)[1]
    return np.asarray(codes[:, None] == codes[None, :], dtype=np.float64)


def _smooth(values: Floats, length: float) -> Floats:
    octaves = np.log2(values)
    return np.asarray(np.exp(-0.5 * ((octaves[:, None] - octaves[None, :]) / length) ** 2))
