"""What a training framework can be told, and what of a candidate it cannot be told."""

from __future__ import annotations

from dataclasses import dataclass

from bexp.explorer.cost_model.part_costs import LOSSES_WITHOUT_LOGITS
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.spec.candidate import Candidate, Recompute
from bexp.explorer.spec.execution import Kernels
from bexp.explorer.spec.mesh import Schedule
from bexp.explorer.spec.model import DType
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.training import Sharding

TORCH_CHOICE = "sdpa"
"""torch's scaled_dot_product_attention, which chooses its kernel by itself."""
LIBRARY_ATTENTION = frozenset(
    {TORCH_CHOICE, "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"}
)
"""Attention implementations of the transformers library."""
LIBRARY_EXPERTS = frozenset({"eager", "batched_mm", "grouped_mm"})
"""Experts implementations of the transformers library that need no other package."""
_EXPERTS = {"loop": "eager", "bmm": "batched_mm"}
"""The transformers library's names of our reference layers' expert back ends, where they differ."""


@dataclass(frozen=True, slots=True)
class Framework:
    """What a framework can be told. A candidate that asks for no more is expressible.

    `targets` are the targets whose measured code the export runs; for others it promises no tokens/s. An empty set of
    kernels or policies means that nothing can be chosen. `first_layers` and `layer_groups` are the policies `layers_N`
    and `groups_N`. `layouts` are those of context parallelism, `schedules` those of pipelines; a framework without any
    cannot be told a mesh. `capacity` says that it can be told a capacity factor of experts, which is part of the model,
    so that nothing is exported without it.
    """

    title: str
    attention: frozenset[str] = frozenset({TORCH_CHOICE})
    experts: frozenset[str] = frozenset({"grouped_mm"})
    policies: frozenset[Recompute] = frozenset({Recompute.NONE, Recompute.FULL})
    first_layers: bool = False
    layer_groups: bool = False
    sharding: frozenset[Sharding] = frozenset({Sharding.NONE, Sharding.ZERO2, Sharding.ZERO3})
    layouts: frozenset[str] = frozenset()
    schedules: frozenset[Schedule] = frozenset()
    capacity: bool = False
    tiles: bool = False
    chunked_loss: bool = False
    compiled_layers: bool = False
    graphs: bool = False
    liger: bool = False
    targets: frozenset[str] = frozenset()

    def has_policy(self, policy: Recompute) -> bool:
        """Return whether the framework can be told a recomputation policy."""
        if policy.is_numbered:
            return self.first_layers if policy.first_layers is not None else self.layer_groups
        return policy in self.policies

    def nearest_policy(self, policy: Recompute, num_layers: int) -> Recompute:
        """Return the policy that recomputes the fewest layers, and at least as many, so that what fitted still fits.

        A policy by operation or by groups becomes `full`. It is `none` for a framework that recomputes nothing.
        """
        by_share = sorted((one for one in self.policies if one.layer_share > 0), key=lambda one: one.layer_share)
        if policy.first_layers is not None:
            by_share = [one for one in by_share if one.layer_share * num_layers >= policy.first_layers] or by_share[-1:]
        else:
            by_share = by_share[-1:]
        return by_share[0] if by_share else Recompute.NONE

    def nearest_sharding(self, level: Sharding) -> Sharding:
        """Return the lowest level that shards at least as much, so that what fitted still fits; else `none`."""
        return next((one for one in Sharding if one.level >= level.level and one in self.sharding), Sharding.NONE)


def attention_name(candidate: Candidate, report: DeviceReport | None) -> str | None:
    """Return the attention implementation by the transformers library's names; None for whatever the code calls.

    A kernel of torch's is `sdpa` if torch chooses it by itself on the device, else `flash`, `cudnn`, `efficient` or
    `math`: it was pinned.
    """
    name = candidate.attention_backend
    if candidate.is_whole:
        return None
    if report is not None and name == report.default_attention and name in {"flash", "cudnn", "efficient", "math"}:
        return TORCH_CHOICE
    return name.removeprefix(f"{TORCH_CHOICE}:")


def experts_name(candidate: Candidate) -> str | None:
    """Return the experts implementation by the transformers library's names; ours keep their own."""
    name = candidate.expert_backend
    return None if name is None else _EXPERTS.get(name, name)


def has_chunked_loss(candidate: Candidate, request: ExplorationRequest) -> bool:
    """Whether a candidate was measured without full logits."""
    if candidate.loss is None and request.model is not None:
        return request.training.loss.kind == "chunked"
    return candidate.loss in LOSSES_WITHOUT_LOGITS  # the code's own loss was measured


def is_compiled(candidate: Candidate, request: ExplorationRequest) -> bool:
    """Whether a candidate's layers were compiled."""
    return request.execution_of(candidate).compiles


def is_replayed(candidate: Candidate, request: ExplorationRequest) -> bool:
    """Whether a candidate's micro-steps were replayed as CUDA graphs."""
    return request.execution_of(candidate).replays


def sharding_of(candidate: Candidate, request: ExplorationRequest) -> Sharding:
    """Return the level of sharding that a candidate was measured with."""
    return candidate.sharding or request.training.sharding


def compute_dtype(request: ExplorationRequest, report: DeviceReport | None) -> DType:
    """Return the number format of the matrix products."""
    parts = None if report is None else report.parts
    return request.explored.dtype or (DType.BFLOAT16 if parts is None else parts.dtype)


def find_missing(
    framework: Framework, candidate: Candidate, request: ExplorationRequest, report: DeviceReport | None
) -> dict[str, str]:
    """Return the dimensions of `candidate` that `framework` cannot be told, each in words."""
    attention, experts = attention_name(candidate, report), experts_name(candidate)
    sharding, layout = sharding_of(candidate, request), candidate.context_parallel_layout
    found = {
        "bta_tile": candidate.bta_tile is not None and not framework.tiles,
        "recompute": not framework.has_policy(candidate.recompute),
        "attention": attention is not None and attention not in framework.attention,
        "experts": experts is not None and experts not in framework.experts,
        "loss": has_chunked_loss(candidate, request) and not framework.chunked_loss,
        "execution": is_compiled(candidate, request) and not framework.compiled_layers,
        "graph": is_replayed(candidate, request) and not framework.graphs,
        "kernels": candidate.kernels is Kernels.LIGER and not framework.liger,
        "sharding": sharding not in framework.sharding,
        "context_parallel": layout is not None and layout not in framework.layouts,
        "settings": candidate.settings is not None,
    }
    words = {
        "bta_tile": f"attention tiles of {candidate.bta_tile} sequences",
        "recompute": f"the recomputation policy '{candidate.recompute}'",
        "attention": f"the attention kernel '{attention}'",
        "experts": f"the expert kernels '{experts}'",
        "loss": f"the {candidate.loss or 'chunked'} loss",
        "execution": "compiled layers",
        "graph": "micro-steps as CUDA graphs",
        "kernels": "the kernels of liger",
        "sharding": f"the sharding level '{sharding}'",
        "context_parallel": f"{candidate.context_parallel_size} devices that share each sequence in layout '{layout}'",
        "settings": f"the target's own setting '{candidate.settings}'",
    }
    return {name: words[name] for name, missing in found.items() if missing}
