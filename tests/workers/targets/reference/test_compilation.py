"""Compiled blocks compute what eager ones do. Traced and differentiated as for the device, but run without code
generation, which would take a compiler and minutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.request.request import ExplorationRequest
from bexp.workers.targets.reference import block
from bexp.workers.targets.reference.decoder import DecoderModel
from bexp.workers.targets.reference.factory import random_tokens
from tests.bexp.kernels.references import relative_error
from tests.workers.targets.reference.models import CPU, small_model, small_moe


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of nodes of each graph that was compiled."""
    compile_function = torch.compile
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        seen.append(len(graph.graph.nodes))
        run: Callable[..., Any] = aot_eager(graph, inputs)
        return run

    def compile_traced(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        assert options == {"dynamic": False}
        return compile_function(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compile_traced)
    torch._dynamo.reset()
    return seen


@pytest.mark.filterwarnings("ignore")  # torch's tracer warns about its own use of deprecated parts
@pytest.mark.parametrize(
    ("loss", "fields", "choice"),
    [
        ("chunked", {"qk_norm": "head", "rotary_fraction": 0.5, "num_query_groups": 2}, {"recompute": "selective"}),
        (
            "full",
            {"moe": small_moe(first_k_dense=1, capacity_factor=0.7), "dtype": "bfloat16"},
            {"expert_backend": "grouped_mm", "capacity_factor": 0.7, "bta_tile": 1, "recompute": "full"},
        ),
    ],
    ids=str,
)
def test_compiled_equals_eager(loss: str, fields: dict[str, Any], choice: dict[str, Any], graphs: list[int]) -> None:
    model = small_model(num_layers=2 if "moe" in fields else 1, **fields)
    candidate = Candidate.model_validate(
        {"micro_batch_size": 2, "attention_backend": "flash", "num_query_groups": model.query_groups, **choice}
    )
    tokens = random_tokens(model, (2, 12), CPU, torch.Generator().manual_seed(0))
    results = []
    for execution in ("eager", "compile"):
        request = ExplorationRequest.model_validate(
            {"model": model, "execution": execution, "training": {"loss": {"kind": loss}}}
        )
        generator = torch.Generator().manual_seed(0)
        module = DecoderModel(model, candidate, request, CPU, generator=generator)
        value = module(tokens, tokens)
        value.backward()
        results.append({"loss": value, **{name: p.grad for name, p in module.named_parameters()}})
        assert bool(graphs) == (execution == "compile")
    for name, expected in results[0].items():
        tolerance = 1e-5 if model.dtype == "float32" else 2e-2
        assert relative_error(results[1][name], expected) <= tolerance, name


@pytest.mark.filterwarnings("ignore")
def test_the_limit_of_recompilations_is_lifted() -> None:
    import torch._dynamo.config as dynamo

    block.compiled(lambda x: x)
    assert dynamo.recompile_limit >= 1000
