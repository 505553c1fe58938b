"""Requests for models that are drawn from a seed, and the devices that they run on."""

from __future__ import annotations

from benchmarks.unseen.draws import Draws
from bexp.explorer.dimensions.bta_tile import BTASpec
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.micro_batch_size import ExploreRange, MicroBatchRange
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.hardware import BackendSupport, HardwareSpec, SoftwareVersions
from bexp.explorer.model.model import DType, ModelSpec, MoESpec
from bexp.explorer.model.training import Sharding, TrainingSpec
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.request.request import ExplorationRequest

GIB = 2**30
ATTENTION = ("cudnn", "flash", "efficient")
EXPERTS = ("grouped_mm", "loop", "bmm", "fused")
STATE_SHARE = 0.8
"""The most of a device's memory that a model's training state may take; a larger one is drawn again."""


def draw_request(draws: Draws) -> ExplorationRequest:
    """Return a request: a dense or a mixture-of-experts model, what may vary, and perhaps a smaller device."""
    model = _draw_model(draws)
    choose = draws.generator("request")
    policies = [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL]
    policies += [p for p in (Recompute.ACTIVATIONS, Recompute.PARTIAL_50) if choose.random() < 0.4]
    names = tuple(str(name) for name in choose.permutation(ATTENTION)[: int(choose.integers(1, 4))])
    experts = tuple(str(name) for name in choose.permutation(EXPERTS)[: int(choose.integers(1, 4))])
    largest = int(choose.choice([16, 32, 64]))
    return ExplorationRequest(
        model=model,
        micro_batch_size=ExploreRange(explore=MicroBatchRange(min=1, max=largest)),
        batch_size=int(choose.choice([128, 256, 512, 1024])),
        num_devices=1,
        bta=BTASpec(enable=False) if choose.random() < 0.7 else BTASpec(tiles=(1, 4)),
        recompute=tuple(policies),
        attention_backends=names,
        expert_backends=experts if model.moe is not None else None,
        allocator="default" if choose.random() < 0.5 else "expandable_segments",
        training=TrainingSpec(sharding=Sharding.NONE),
        execution=Execution.EAGER,
    )


def draw_report(draws: Draws, request: ExplorationRequest) -> DeviceReport:
    memory = int(draws.generator("memory").choice([24, 40, 48, 80, 96, 141])) * GIB
    hardware = HardwareSpec(
        device_kind="cuda",
        device_name="unseen device",
        memory_bytes=memory,
        memory_limit_bytes=memory - GIB // 2,
        context_bytes=round(draws.between(0.3, 0.9, "context") * GIB),
        matmul_flops_per_second={DType.BFLOAT16: draws.scale_between(1e14, 9e14, "peak")},
        memory_bandwidth_bytes_per_second=draws.scale_between(8e11, 4.5e12, "bandwidth"),
        launch_seconds=draws.scale_between(3e-6, 4e-5, "launch"),
        versions=SoftwareVersions(python="3.12", torch="2.11", cuda="13.0", cudnn="9.19"),
    )
    attention = request.attention_backends or ATTENTION
    experts = request.expert_backends or ()
    return DeviceReport(
        hardware=hardware,
        attention_backends=tuple(BackendSupport(name=name, usable=True) for name in attention),
        expert_backends=tuple(BackendSupport(name=name, usable=True) for name in experts),
        default_attention=attention[0],
        default_experts=experts[0] if experts else None,
    )


def _draw_model(draws: Draws) -> ModelSpec:
    choose = draws.generator("model")
    head = int(choose.choice([64, 96, 128]))
    heads = int(choose.choice([8, 12, 16, 20, 32]))
    gated = bool(choose.random() < 0.6)
    width = heads * head
    moe = None
    if choose.random() < 0.5:
        moe = MoESpec(
            num_experts=int(choose.choice([8, 16, 32, 64])),
            top_k=int(choose.choice([1, 2, 4])),
            expert_ffn_hidden_size=128 * round(width * float(choose.choice([0.25, 0.5, 1.0])) / 128),
        )
    return ModelSpec(
        name="unseen",
        num_layers=int(choose.choice([2, 4, 6, 12, 24])),
        hidden_size=width,
        ffn_hidden_size=128 * round(width * float(choose.choice([2.67, 3.5, 4.0])) / 128),
        num_attention_heads=heads,
        num_query_groups=int(choose.choice([1, 2, 4, heads])),
        vocab_size=int(choose.choice([32000, 50257, 50304, 100352, 128256, 151936])),
        seq_length=int(choose.choice([256, 512, 1024, 2048, 4096, 8192])),
        gated_mlp=gated,
        activation="silu" if gated else "gelu",
        moe=moe,
    )
