"""Devices that exist only in arithmetic: the hidden truths behind simulated tables, all drawn from a seed.

`SmoothDevice` is what the search was worked on with. `JaggedDevice`, of another structure in every respect, was looked
at once its first version stood, and showed that priors had to be revised by recorded runs. `LumpyDevice`, of a third
structure, was run when nothing was changed any more.
"""

from __future__ import annotations

import zlib

import numpy as np

from bexp.explorer.cost_model.activation_memory import predict_component_bytes
from bexp.explorer.cost_model.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.cost_model.roofline import roofline_seconds
from bexp.explorer.spec.candidate import Candidate
from bexp.explorer.spec.hardware import HardwareSpec
from bexp.explorer.spec.parts import ExploredModel
from bexp.explorer.spec.request import ExplorationRequest

ATTENTION = {"cudnn": 0.62, "flash": 0.5, "efficient": 0.28, "math": 0.4}
EXPERTS = {
    "grouped_mm": 0.5,
    "loop": 0.25,
    "bmm": 0.45,
    "fused": 0.6,
    "triton_grouped": 0.5,
    "hopper_grouped": 0.52,
    "cublas_grouped": 0.3,
    "block_sparse": 0.35,
}
RUN_STD = 0.004
COMPOSITION_SHARED_STD = 0.015
COMPOSITION_OWN_STD = 0.004


class SmoothDevice:
    """Kernels whose efficiency over the roofline saturates with the tokens they see and droops for large ones.

    Waves and each component's own part come on top; back ends cross over; runs differ by a normal error.
    """

    def __init__(self, request: ExplorationRequest, hardware: HardwareSpec, seed: int) -> None:
        self._request = request
        self._hardware = hardware
        self._seed = seed
        self._composition_bias = 1 + COMPOSITION_SHARED_STD * self._normal("composition")

    def seconds(self, component: Component, model: ExploredModel) -> tuple[float, float]:
        """Device and host seconds without noise."""
        predicted = roofline_seconds(component, model, self._request, self._hardware)
        if component.kind is ComponentKind.OPTIMIZER:
            return predicted.device / 0.8, predicted.host
        sort = f"{component.kind}:{component.backend}"
        typical = {**ATTENTION, **EXPERTS}.get(str(component.backend), 0.65)
        peak = typical * np.exp(0.15 * self._normal(f"peak:{sort}"))
        tokens = (component.bta_tile or component.micro_batch_size) * model.seq_length
        half = 600 * np.exp(0.7 * self._normal(f"half:{sort}"))
        droop = 0.02 * abs(self._normal(f"droop:{sort}")) * max(0.0, np.log2(tokens / 16384))
        wave = 0.02 * self._normal(f"wave:{sort}:{component.micro_batch_size}:{component.bta_tile}")
        mode = 0.02 * self._normal(f"mode:{sort}:{component.recompute}:{component.bta_tile is None}")
        own = 0.004 * self._normal(f"own:{component.key}")
        recomputes = component.recompute is not BlockRecompute.NONE
        efficiency = peak * tokens / (tokens + half) * (1 - min(0.3, droop))
        device = predicted.device / efficiency * np.exp(wave + own + (mode if recomputes else 0.0))
        return float(device), predicted.host * 1.4 * float(np.exp(0.2 * self._normal(f"host:{sort}")))

    def sizes(self, component: Component, model: ExploredModel) -> tuple[int, int, int]:
        """Saved, forward-peak and backward-peak bytes."""
        predicted = predict_component_bytes(component, model, self._request)
        similar = f"{component.kind}:{component.backend}:{component.recompute}:{component.bta_tile is None}"
        factor = 1.05 * np.exp(0.08 * self._normal(f"bytes:{similar}"))
        saved, forward, backward = (
            round(factor * b) for b in (predicted.saved, predicted.forward_peak, predicted.backward_peak)
        )
        return saved, forward, backward

    def whole_model_factor(self, candidate: Candidate) -> float:
        """Whole over composed seconds."""
        return self._composition_bias * float(np.exp(COMPOSITION_OWN_STD * self._normal(candidate.describe())))

    def standard_error(self, component: Component) -> float:
        """Relative standard error that one run states of its median."""
        return RUN_STD / 2

    def run_factor(self, component: Component, run: int, rng: np.random.Generator) -> float:
        """What the seconds of one run are off by."""
        return float(np.exp(RUN_STD * rng.standard_normal()))

    def describe_noise(self) -> str:
        """How runs differ, in words."""
        return f"simulated: runs differ by {RUN_STD:.1%}, medians by half of that"

    def _normal(self, name: str) -> float:
        return float(np.random.default_rng([self._seed, zlib.crc32(name.encode())]).standard_normal())


class JaggedDevice(SmoothDevice):
    """Fixed costs and rates, tiles that fill up, an algorithm chosen anew at each size, and runs with heavy tails.

    A component takes a fixed cost and a time a tile, of which the last counts in full; each size jumps by up to 3%
    either way, whole sorts by recomputation by up to 8%. Runs share what the device does at the moment (its clocks)
    and have errors of their own with three degrees of freedom, 0.2 to 2% in scale from device to device. Composition
    errors depend on recomputation and size.
    """

    def __init__(self, request: ExplorationRequest, hardware: HardwareSpec, seed: int) -> None:
        super().__init__(request, hardware, seed)
        self._run_scale = float(0.002 * 10 ** self._uniform("run scale"))
        self._drift_scale = 0.5 * self._run_scale

    def seconds(self, component: Component, model: ExploredModel) -> tuple[float, float]:
        """Device and host seconds without noise."""
        predicted = roofline_seconds(component, model, self._request, self._hardware)
        if component.kind is ComponentKind.OPTIMIZER:
            return predicted.device / (0.7 + 0.2 * self._uniform("optimizer")), predicted.host
        sort = f"{component.kind}:{component.backend}"
        typical = {**ATTENTION, **EXPERTS}.get(str(component.backend), 0.65)
        rate = typical * (0.75 + 0.5 * self._uniform(f"rate:{sort}"))
        at_once = component.bta_tile or component.micro_batch_size
        tokens = at_once * model.seq_length
        tile = 128 * 2 ** round(6 * self._uniform(f"tile:{sort}"))
        filled = np.ceil(tokens / tile) * tile / tokens
        fixed = 1500 * self._uniform(f"fixed:{sort}") ** 2 / tokens
        cache = 1 + 0.06 * self._uniform(f"cache:{sort}") * (tokens > 20000 * (1 + self._uniform(f"edge:{sort}")))
        jump = 0.03 * (2 * self._uniform(f"jump:{sort}:{at_once}:{component.micro_batch_size}") - 1)
        mode = 0.0
        if component.recompute is not BlockRecompute.NONE:
            mode = 0.08 * (2 * self._uniform(f"mode:{sort}:{component.recompute}") - 1)
        device = predicted.device / rate * (min(filled, 1.5) + fixed) * cache * (1 + jump) * (1 + mode)
        return float(device), predicted.host * (1 + self._uniform(f"host:{sort}"))

    def whole_model_factor(self, candidate: Candidate) -> float:
        """Whole over composed seconds."""
        shared = 0.02 * self._uniform("composition") + 0.01 * self._normal(f"policy:{candidate.recompute}") / 2
        return 1 + shared + 0.003 * self._normal(f"size:{candidate.micro_batch_size}")

    def standard_error(self, component: Component) -> float:
        """Relative standard error that one run states of its median: less than what runs differ by."""
        return float(0.001 * (1 + 3 * self._uniform(f"error:{component.key}")))

    def run_factor(self, component: Component, run: int, rng: np.random.Generator) -> float:
        """What one run's seconds are off by."""
        drift = self._drift_scale * self._normal(f"drift:{run}:{component.micro_batch_size // 8}")
        return float(np.exp(drift + self._run_scale * np.clip(rng.standard_t(3), -8, 8)))

    def describe_noise(self) -> str:
        """How runs differ, in words."""
        return f"simulated: runs differ by {self._run_scale:.1%} with heavy tails, and drift together by half of that"

    def _uniform(self, name: str) -> float:
        return float(np.random.default_rng([self._seed, zlib.crc32(name.encode()), 1]).random())


class LumpyDevice(SmoothDevice):
    """Efficiency that rises along a logistic curve of the tokens, with a few sizes that are off by a lot.

    One component in eight is 2 to 6% slower than its neighbours. Runs of each kind of component have a scale of their
    own, 0.1 to 1.5%, and one run in twenty is disturbed by another 5%. Composition errors depend on the back ends.
    """

    def seconds(self, component: Component, model: ExploredModel) -> tuple[float, float]:
        """Device and host seconds without noise."""
        predicted = roofline_seconds(component, model, self._request, self._hardware)
        sort = f"{component.kind}:{component.backend}"
        if component.kind is ComponentKind.OPTIMIZER:
            return predicted.device * 1.3, predicted.host
        typical = {**ATTENTION, **EXPERTS}.get(str(component.backend), 0.65)
        tokens = (component.bta_tile or component.micro_batch_size) * model.seq_length
        middle = 9.5 + 1.5 * self._normal(f"middle:{sort}")
        width = 0.8 * np.exp(0.3 * self._normal(f"width:{sort}"))
        rise = 1 / (1 + np.exp(-(np.log2(tokens) - middle) / width))
        floor = 0.4 + 0.4 * self._draw(f"floor:{sort}")
        peak = typical * np.exp(0.2 * self._normal(f"peak:{sort}"))
        lump = 0.02 + 0.04 * self._draw(f"lump:{component.key}") if self._draw(f"off:{component.key}") < 1 / 8 else 0.0
        again = component.recompute is not BlockRecompute.NONE or component.bta_tile is not None
        mode = 0.03 * self._normal(f"mode:{sort}:{component.recompute}:{component.bta_tile is None}") if again else 0.0
        own = 0.003 * self._normal(f"own:{component.key}")
        device = predicted.device / (peak * (floor + (1 - floor) * rise)) * np.exp(lump + mode + own)
        return float(device), predicted.host * 1.2

    def whole_model_factor(self, candidate: Candidate) -> float:
        """Whole over composed seconds."""
        backends = f"{candidate.attention_backend}:{candidate.expert_backend}:{candidate.recompute}"
        own = 0.002 * self._normal(candidate.describe())
        return float(np.exp(0.01 * self._normal("composition") + 0.004 * self._normal(backends) + own))

    def standard_error(self, component: Component) -> float:
        """Relative standard error that one run states of its median."""
        return 0.4 * self._scale(component)

    def run_factor(self, component: Component, run: int, rng: np.random.Generator) -> float:
        """What the seconds of one run are off by."""
        disturbed = 0.05 * rng.random() if rng.random() < 0.05 else 0.0
        return float(np.exp(self._scale(component) * rng.standard_normal() + disturbed))

    def describe_noise(self) -> str:
        """How runs differ, in words."""
        return "simulated: runs of each kind differ by a scale of their own, one in twenty by up to 5% more"

    def _scale(self, component: Component) -> float:
        return float(0.001 * 15 ** self._draw(f"scale:{component.kind}"))

    def _draw(self, name: str) -> float:
        return float(np.random.default_rng([self._seed, zlib.crc32(name.encode()), 2]).random())
