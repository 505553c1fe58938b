"""Activations and AdamW in the host's memory, and linear layers in float8, on a CUDA device."""

from __future__ import annotations

import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.cost.composition import Composition
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.memory_meters import measure_memory
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.targets.transformers.target import TransformersTarget
from tests.gpu.needs import one_gpu
from tests.workers.targets.transformers.targets import HARDWARE

pytestmark = [
    *one_gpu(),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),  # of torchao's own code
]
pytest.importorskip("transformers")
DEVICE = torch.device("cuda", 0)
WORKSPACE_BYTES = 160 * 2**20
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
}
OUTPUT_BYTES = 4 * 1024 * 2048 * 2
"""Of a layer: 4 texts of 1,024 tokens in bfloat16."""
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


def request(**fields: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate(
        {"hf_config": CONFIG, "hf_seq_length": 1024, "batch_size": 8, "device_kind": "cuda", **fields}
    )


def candidate(**fields: Any) -> Candidate:
    shape = {"micro_batch_size": 4, "attention_backend": "sdpa", "num_query_groups": 1, "loss": "chunked"}
    return Candidate.model_validate({**shape, **fields})


def sizes_of(target: TransformersTarget, table: Composition, parts: ModelParts) -> np.ndarray:
    """What each component keeps, and the peaks of its passes. Nothing of them is held afterwards."""
    sizes = np.zeros((3, len(table.components)))
    for column, component in enumerate(table.components):
        if component.kind is ComponentKind.OPTIMIZER:
            continue
        with target.component(component, parts, table.request) as passes:
            for run in (passes.prepare_forward, passes.forward, passes.prepare_backward, passes.backward):
                run()
            found = measure_memory(passes, DEVICE)
            sizes[:, column] = found.saved, found.forward_peak, found.backward_peak
    return sizes


def peaks(recompute: str) -> tuple[float, int]:
    """The composed peak of a step, and that of the whole model."""
    asked = request(recompute=["none", "full", "offload"], losses=["chunked"])
    instruments = Instruments(DEVICE)
    target, chosen = TransformersTarget(asked, instruments), candidate(recompute=recompute)
    parts = target.report(HARDWARE).parts
    assert parts is not None
    assert recompute in parts.policies
    table = Composition([chosen], parts, asked)
    saved, transient = table.activation_bytes(*sizes_of(target, table, parts))
    with target.training_run(chosen, parts, asked) as run_of_all:
        run_of_all.begin()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run_of_all.step()
        run_of_all.finish()
        whole = torch.cuda.max_memory_allocated() - instruments.own_bytes
    return float((table.static_bytes_C + saved + transient)[0]), whole


@pytest.mark.alone
def test_the_peak_with_activations_on_the_host_is_composed_from_measured_layers() -> None:
    policies, spawn = ("offload", "full", "none"), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:  # none holds what an earlier one has measured
        found = dict(zip(policies, pool.map(peaks, policies), strict=True))
    for policy, (composed, whole) in found.items():
        # A layer's output is counted with the layer. Recomputation keeps it, as the next layer's input. Without it,
        # a layer of Llama keeps the output of its norm and not the input.
        spare = OUTPUT_BYTES * CONFIG["num_hidden_layers"] if policy == "none" else 0
        assert 0 <= whole - (composed - spare) < WORKSPACE_BYTES, f"{policy}: cuBLAS has one for each thread"
    assert found["offload"][1] < found["full"][1] < found["none"][1]


@needs_torchao
@pytest.mark.alone
def test_adamw_in_the_hosts_memory_leaves_the_device_its_state() -> None:
    asked = request(training={"optimizer": {"name": "adamw_cpu_offload"}})
    target = TransformersTarget(asked, Instruments(DEVICE))
    parts = target.report(HARDWARE).parts
    assert parts is not None
    assert parts.optimizer_state_bytes is not None
    assert parts.optimizer_state_bytes < 0.01 * parts.parameter_bytes
    assert parts.optimizer_host_bytes is not None
    assert parts.optimizer_host_bytes >= 4 * 0.99 * parts.parameter_bytes, "weight, gradient and two moments"
    before = torch.cuda.memory_allocated()
    with target.training_run(candidate(), parts, asked) as run:
        weights = [p.detach().clone() for p in run._model.parameters() if p.numel() > 4096]
        run.begin()
        run.step()
        trained = [p for p in run._model.parameters() if p.numel() > 4096]
        assert all(not torch.equal(p, was) for p, was in zip(trained, weights, strict=True))
        assert torch.cuda.memory_allocated() - before < 2.6 * parts.parameter_bytes, "the model and these copies"


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_layers_in_float8_are_near_those_in_bfloat16(recipe: str) -> None:
    if torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("needs compute capability 8.9")
    asked = request(training={"precision": f"float8_{recipe}"})
    target = TransformersTarget(asked, Instruments(DEVICE))
    parts = target.report(HARDWARE).parts
    assert parts is not None
    assert parts.float8 is not None
    assert parts.float8.num_linear == 8 * 7
    assert 0.0 < parts.float8.output_error < 0.15
    assert 0.0 < parts.float8.gradient_error < 0.2
    with target.training_run(candidate(), parts, asked) as run:
        run.begin()
        run.step()
