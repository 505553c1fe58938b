"""An exploration of a model's own code on a simulated device, and the truth about each of its candidates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.step import required_bytes
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.model.hardware import BackendSupport, HardwareSpec
from bexp.explorer.model.parts import ExploredModel, LayerPart, ModelParts, Part
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import enumerate_candidates
from tests.explorer.cost.described import part, parts
from tests.explorer.explorations import answer_of, run, trials_of
from tests.explorer.exports.samples import CONFIG
from tests.explorer.simulator import SimulatedDevice, report

SEQ_LENGTH = 2048
LAYERS = 8
LAYER_PARAMETERS, SHELL_PARAMETERS = 20_000_000, 100_000_000
NUM_PARAMETERS = LAYERS * LAYER_PARAMETERS + SHELL_PARAMETERS
LOGIT_BYTES: int = CONFIG["vocab_size"] * (2 + 4 + 4)
"""For each token: logits in bfloat16, their float32 copy and its gradient."""


def described() -> ModelParts:
    """Eight equal layers with experts, and long sequences, so that memory and kernels decide."""
    layer = LayerPart(name="moe", has_experts=True, **part(LAYER_PARAMETERS, saved_bytes_per_token=40_000.0))
    shell = Part(**part(SHELL_PARAMETERS, transient_bytes_per_token=float(LOGIT_BYTES)))
    return parts(
        seq_length=SEQ_LENGTH,
        layers=("moe",) * LAYERS,
        kinds=[layer],
        shell=shell,
        num_parameters=NUM_PARAMETERS,
        parameter_bytes=2 * NUM_PARAMETERS,
        trainable_bytes=2 * NUM_PARAMETERS,
        output_bytes_per_token=4096,
    )


@dataclass(frozen=True)
class Simulated:
    """A finished exploration. `tokens` and `peaks` are the truth of each candidate, whether it fits or not."""

    source: ExportSource
    tokens: dict[Candidate, float]
    peaks: dict[Candidate, int]
    hardware: HardwareSpec

    def fits(self, candidate: Candidate, extra_bytes: int = 0) -> bool:
        """Whether a candidate fits the device if its peak is higher by `extra_bytes`."""
        peak = self.peaks[candidate] + extra_bytes
        return required_bytes(peak, self.hardware, self.request.allocator) <= self.hardware.memory_limit_bytes

    @property
    def request(self) -> ExplorationRequest:
        assert self.source.request is not None
        return self.source.request

    @property
    def known(self) -> Recommendation:
        assert self.source.recommendation is not None
        return self.source.recommendation


class FasterIfPinned(SimulatedDevice):
    """A device whose layers take a tenth less time with `cudnn`."""

    def seconds(self, component: Component, model: ExploredModel) -> tuple[float, float]:
        device, host = super().seconds(component, model)
        return (0.9 if "cudnn" in component.key else 1.0) * device, host


def simulated(memory_gib: float, **changes: Any) -> Simulated:
    """Explore on a device that knows `sdpa`, which it chooses by itself, and `cudnn`, which is faster if pinned."""
    values = {
        "hf_config": CONFIG,
        "hf_seq_length": SEQ_LENGTH,
        "batch_size": 96,
        "micro_batch_size": [1, 2, 3, 4, 6, 8, 12, 16],
        "routing": {"kind": "uniform"},
        **changes,
    }
    return _simulated(memory_gib, ExplorationRequest.model_validate(values).model_dump_json())


@cache
def _simulated(memory_gib: float, document: str) -> Simulated:
    request = ExplorationRequest.model_validate_json(document)
    found, device = device_report(memory_gib), FasterIfPinned(request)
    steps = run(request, device, rep=found)
    recommendation = answer_of(steps).recommendation
    model = described()
    table = Composition(enumerate_candidates(request, found, model).candidates, model, request)
    sizes = np.array([device.weigh(c, model) for c in table.components], dtype=np.float64).T
    peaks = table.static_bytes_C + np.add(*table.activation_bytes(*sizes))
    return Simulated(
        source=ExportSource("job1", request, found, recommendation, trials_of(steps)),
        tokens=dict(zip(table.candidates, device.true_tokens_per_second(table), strict=True)),
        peaks=dict(zip(table.candidates, (round(peak) for peak in peaks), strict=True)),
        hardware=found.hardware,
    )


def device_report(memory_gib: float) -> DeviceReport:
    """The report of the simulated device."""
    return report(memory_gib=memory_gib).model_copy(
        update={
            "parts": described(),
            "attention_backends": tuple(BackendSupport(name=name, usable=True) for name in ("sdpa", "cudnn")),
            "default_attention": "sdpa",
            "expert_backends": (BackendSupport(name="grouped_mm", usable=True),),
        }
    )
