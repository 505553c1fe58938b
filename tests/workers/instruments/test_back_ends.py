from __future__ import annotations

import torch

from bexp.explorer.dimensions.attention import ATTENTION_OF, TORCH_KERNELS
from bexp.explorer.dimensions.experts import EXPERTS_OF, LIBRARY_EXPERTS
from bexp.explorer.model.expert_kernels import NAMED_EXPERTS
from bexp.explorer.model.hardware import NAME_IT
from bexp.explorer.model.target import BEXP, TRANSFORMERS
from bexp.kernels.experts.registry import expert_backends
from bexp.kernels.shapes import AttentionShape, ExpertsShape
from bexp.transformers.experts import OURS
from bexp.workers.instruments.back_ends import report_device
from bexp.workers.instruments.kernel_shapes import attention_shape, experts_shape
from bexp.workers.targets.transformers import probe
from tests.contracts.samples import make_report
from tests.workers.profiler.samples import MODEL
from tests.workers.targets.reference.models import small_model, small_moe


def test_a_report_says_which_attention_serves_sequences_that_devices_share() -> None:
    report = report_device(MODEL, make_report().hardware, torch.device("cpu"))
    found = {backend.name: backend for backend in report.attention_backends}
    assert found["flash"].context_parallel
    assert found["math"].context_parallel
    for backend in found.values():
        assert backend.context_parallel is (backend.context_parallel_reason is None)
        if not backend.usable:
            assert backend.context_parallel_reason == backend.reason
    assert "no attention back end 'efficient'" in str(found["efficient"].context_parallel_reason) or (
        not found["efficient"].usable
    )


def test_a_request_may_name_what_workers_have() -> None:
    """No worker has back ends of its own: a new one is a module here."""
    report = report_device(MODEL, make_report().hardware, torch.device("cpu"))
    assert {backend.name for backend in report.attention_backends} == ATTENTION_OF[BEXP]
    assert {backend.name for backend in expert_backends()} == EXPERTS_OF[BEXP]
    assert {*LIBRARY_EXPERTS, *OURS} == EXPERTS_OF[TRANSFORMERS]
    assert {*probe.STOCK_EXPERTS} < LIBRARY_EXPERTS
    assert {kernel for kernels in probe.PINNED.values() for kernel in kernels} == TORCH_KERNELS


def test_a_report_tries_what_must_be_named_only_if_it_is() -> None:
    model = small_model(moe=small_moe())
    report = report_device(model, make_report().hardware, torch.device("cpu"), named_experts=["cublas_grouped"])
    found = {backend.name: backend for backend in report.expert_backends}
    assert {name for name, backend in found.items() if backend.only_when_named} == NAMED_EXPERTS & EXPERTS_OF[BEXP]
    assert found["cublas_grouped"].reason == "cuBLAS needs a CUDA device"
    assert found["block_sparse"].reason == NAME_IT


def test_the_kernels_shapes_are_the_models() -> None:
    model = small_model(num_query_groups=2, moe=small_moe(), dtype="bfloat16", gated_mlp=False, activation="gelu")
    assert model.moe is not None
    assert attention_shape(model) == AttentionShape(
        num_heads=model.num_attention_heads,
        num_query_groups=2,
        head_size=model.head_size,
        dtype=torch.bfloat16,
        seq_length=model.seq_length,
    )
    assert experts_shape(model) == ExpertsShape(
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.moe.expert_ffn_hidden_size,
        num_experts=model.moe.num_experts,
        top_k=model.moe.top_k,
        dtype=torch.bfloat16,
        gated=False,
        activation="gelu",
    )


def test_a_model_without_experts_has_no_shape_of_experts() -> None:
    assert experts_shape(small_model()) is None
