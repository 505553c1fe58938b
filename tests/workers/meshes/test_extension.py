"""Workers reach meshes through a list of extensions: which components and tasks are theirs, and what a job imports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from bexp.explorer.cost.components import Component, ComponentKind, ExchangeSpec, Operation
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.meshes.mesh import Mesh, MeshRun
from bexp.explorer.meshes.shards import SHARED_EXPERTS
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.targets.extensions import extension_for

MODEL = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256}
REQUEST = {"model": {**MODEL, "seq_length": 64}, "num_devices": 2, "batch_size": 8}
EXCHANGE = ExchangeSpec(operation=Operation.SEND, size=2, stride=1, num_bytes=8)
IMPORTS = """
import sys
from bexp.workers.targets.choice import import_target
import_target("bexp")
assert "bexp.workers.meshes.training_run" in sys.modules
"""


def component(**changes: Any) -> Component:
    return Component.model_validate({"kind": ComponentKind.DENSE_FFN, "micro_batch_size": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "is_theirs"),
    [
        ({}, False),
        ({"tensor_parallel_size": 2}, True),
        ({"part": SHARED_EXPERTS}, True),
        ({"kind": ComponentKind.EXCHANGE, "exchange": EXCHANGE}, True),
        ({"kind": ComponentKind.COMMUNICATION}, False),
    ],
)
def test_shards_and_exchanges_are_measured_by_the_extension(changes: dict[str, Any], is_theirs: bool) -> None:
    assert (extension_for(component(**changes)) is not None) is is_theirs


@pytest.mark.parametrize("run", [None, MeshRun(mesh=Mesh(pipeline=2), layers_per_stage=(1, 1), num_micro_batches=2)])
def test_whole_models_on_meshes_are_run_by_the_extension(run: MeshRun | None) -> None:
    task = TrialTask(
        number=0,
        kind=TrialKind.WHOLE_MODEL,
        model=ExplorationRequest.model_validate(REQUEST).shapes,
        candidate=Candidate(micro_batch_size=1, attention_backend="math", num_query_groups=4),
        timeout_seconds=1.0,
        num_processes=2,
        shared_run=run,
    )
    read = TrialTask.model_validate_json(task.model_dump_json())
    assert read == task
    assert (extension_for(read) is not None) is (run is not None)


def test_a_job_imports_what_its_meshes_need_before_its_trials() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
