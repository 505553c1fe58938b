"""Small models, and requests for them."""

from __future__ import annotations

from bexp.explorer.cost.components import Component
from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.hardware import HardwareSpec, SoftwareVersions
from bexp.explorer.model.model import DType, ModelSpec, MoESpec
from bexp.explorer.model.training import Sharding
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from tests.waits import PATIENCE_SECONDS

MODEL = ModelSpec(
    name="small",
    num_layers=3,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=512,
    seq_length=64,
    dtype=DType.FLOAT32,
    moe=MoESpec(num_experts=4, top_k=2, expert_ffn_hidden_size=64, first_k_dense=1),
)
REQUEST = ExplorationRequest(model=MODEL)
HARDWARE = HardwareSpec(
    device_kind="cpu",
    device_name="test",
    memory_bytes=1 << 34,
    memory_limit_bytes=1 << 33,
    matmul_flops_per_second={DType.FLOAT32: 1e11, DType.BFLOAT16: 1e11},
    memory_bandwidth_bytes_per_second=1e10,
    launch_seconds=1e-6,
    versions=SoftwareVersions(python="3", torch="2"),
)


def candidate(
    micro_batch_size: int = 2,
    *,
    bta_tile: int | None = None,
    recompute: Recompute = Recompute.NONE,
    attention: str = "flash",
    experts: str | None = "grouped_mm",
    layout: str | None = None,
    size: int = 1,
    sharding: Sharding | None = None,
) -> Candidate:
    return Candidate(
        micro_batch_size=micro_batch_size,
        bta_tile=bta_tile,
        recompute=recompute,
        attention_backend=attention,
        expert_backend=experts,
        num_query_groups=2,
        context_parallel_size=size,
        context_parallel_layout=layout,
        sharding=sharding,
    )


def components_of(chosen: Candidate, model: ModelSpec = MODEL, *, training: bool = True) -> tuple[Component, ...]:
    return Decomposer(model, training=training)(chosen).components


def plan(
    chosen: Candidate,
    components: tuple[Component, ...] | None = None,
    *,
    model: ModelSpec = MODEL,
    timeout_seconds: float = PATIENCE_SECONDS,
    num_processes: int = 1,
) -> TrialTask:
    """A components trial; of all the candidate's components unless some are named."""
    return TrialTask(
        number=0,
        kind=TrialKind.COMPONENTS,
        model=model,
        candidate=chosen,
        components=components_of(chosen, model) if components is None else components,
        timeout_seconds=timeout_seconds,
        num_processes=num_processes,
    )


def whole_model_plan(chosen: Candidate, *, model: ModelSpec = MODEL, num_processes: int = 1) -> TrialTask:
    return TrialTask(
        number=0,
        kind=TrialKind.WHOLE_MODEL,
        model=model,
        candidate=chosen,
        timeout_seconds=PATIENCE_SECONDS,
        num_processes=num_processes,
    )
