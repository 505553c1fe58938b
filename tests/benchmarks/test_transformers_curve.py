from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import transformers_curve, transformers_models
from benchmarks.isolation import Isolated, Lost
from benchmarks.transformers_curve import Curve, main, prepare
from benchmarks.transformers_models import build, config_of, expert_loads, impose_routes, time_training
from bexp.explorer.records.measurement import Measurement, Outcome
from bexp.explorer.records.trial import TrialKind, TrialPlan
from bexp.explorer.spec.model import ModelSpec
from bexp.explorer.spec.request import ExplorationRequest
from bexp.explorer.spec.routing import RoutingSpec
from bexp.workers.process.environment import CHILD_DEFAULTS
from tests.explorer.simulator import SimulatedDevice, report

DENSE: dict[str, Any] = {
    "name": "tiny",
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 128,
    "seq_length": 32,
    "tie_embeddings": True,
}
SPARSE = {key: value for key, value in DENSE.items() if key not in {"ffn_hidden_size", "tie_embeddings"}} | {
    "qk_norm": "full",
    "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 32},
}
CPU = torch.device("cpu")


class _Answers(Isolated):
    """A process that answers from a list, or not at all."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self.answers = list(answers)

    def call(self, function: Any, *arguments: Any, seconds: float) -> Any:
        return self.answers.pop(0)


def _timed(seconds: float) -> dict[str, Any]:
    return {"outcome": "ok", "micro_step_seconds": seconds, "optimizer_seconds": 0.0, "standard_error_seconds": 0.0}


def _curve(rows: list[dict[str, Any]], deadline: float = float("inf")) -> Curve:
    request = prepare(ExplorationRequest.model_validate({"model": SPARSE, "batch_size": 8}))
    return Curve("tiny", request, report(), "cpu", rows, deadline)


def test_what_is_larger_than_too_large_is_not_tried() -> None:
    curve = _curve([])
    curve.time_transformers(
        _Answers(_timed(1.0), Lost(True, "late"), {"outcome": "out_of_memory", "reason": "no"}), [1, 2, 4, 8]
    )
    assert [row["outcome"] for row in curve.rows] == ["ok", "timed_out", "out_of_memory", "out_of_memory"]
    assert curve.rows[0]["tokens_per_second"] == pytest.approx(32)
    assert curve.rows[-1]["reason"] == "micro-batch 4 was too large"


def test_rows_that_exist_are_kept_and_none_begins_after_the_deadline() -> None:
    curve = _curve([])
    curve.time_transformers(_Answers(_timed(1.0)), [1])
    again = _curve(curve.rows)
    again.time_transformers(_Answers(_timed(3.0)), [1, 2])
    assert [row["micro_step_seconds"] for row in again.rows] == [1.0, 3.0]
    late = _curve([], deadline=0.0)
    late.time_transformers(_Answers(), [1])
    assert late.rows == []


def test_components_are_added_up_as_measured_and_whole_models_run() -> None:
    curve = _curve([])
    request = curve._request
    device = SimulatedDevice(request, noise=0.0)
    plans: list[TrialPlan] = []

    def measure(plan: TrialPlan) -> Measurement:
        plans.append(plan)
        found = device(plan)
        if plan.kind is TrialKind.WHOLE_MODEL and plan.candidate.micro_batch_size == 2:
            return Measurement(candidate=plan.candidate, outcome=Outcome.OUT_OF_MEMORY, reason="no")
        return found

    curve.time_product(SimpleNamespace(measure=measure), [1, 2])  # type: ignore[arg-type]  # a stand-in
    assert [(r["side"], r["micro_batch_size"], r["outcome"]) for r in curve.rows] == [
        ("composed", 1, "ok"),
        ("whole", 1, "ok"),
        ("composed", 2, "ok"),
        ("whole", 2, "out_of_memory"),
    ]
    keys = [component.key for plan in plans for component in plan.components]
    assert len(keys) == len(set(keys))
    measured = {m.component.kind.value: m for m in device(plans[0]).components}
    per_layer = measured["attention"].device_seconds + measured["moe_ffn"].device_seconds
    ends = measured["embedding"].device_seconds + measured["head"].device_seconds
    assert curve.rows[0]["micro_step_seconds"] >= 2 * per_layer + ends
    assert curve.rows[0]["experts"] == "grouped_mm"
    assert 1.0 <= curve.rows[0]["imbalance"] <= 4.0


def test_only_training_on_one_device_is_compared() -> None:
    with pytest.raises(ValueError, match="only training on one device"):
        prepare(ExplorationRequest.model_validate({"model": DENSE, "num_devices": 2}))


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(transformers_curve, "find_spec", lambda _: None)
    assert main(["--out", str(tmp_path / "x.json")]) == 2
    assert "pip install transformers" in capsys.readouterr().err


class _Gate(nn.Module):
    """A router whose every token goes to the first experts."""

    def __init__(self, result: str) -> None:
        super().__init__()
        self.result = result
        self.weight = nn.Parameter(torch.zeros(8, 4))

    def forward(self, x_TD: Tensor) -> Any:
        logits = torch.arange(8.0).flip(0).expand(len(x_TD), 8)
        if self.result == "logits":
            return logits
        weights, indices = logits.topk(2)
        return logits, weights, indices


@pytest.mark.parametrize("result", ["logits", "indices"])
def test_the_busiest_expert_is_found_in_what_the_router_returns(result: str) -> None:
    layer = nn.Module()
    layer.mlp = nn.Module()
    layer.mlp.gate = _Gate(result)
    layer.config = SimpleNamespace(num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)  # type: ignore[assignment]  # a stand-in
    with expert_loads(layer) as loads:
        layer.mlp.gate(torch.zeros(12, 4))
    layer.mlp.gate(torch.zeros(12, 4))
    impose_routes(layer, torch.arange(24).view(12, 2) % 8)
    with expert_loads(layer) as imposed:
        found = layer.mlp.gate(torch.zeros(12, 4))
    assert loads == [4.0]  # all tokens on each of two experts, where a quarter of them is the mean
    assert imposed == [1.0]
    if result == "indices":
        assert found[1].sum(-1) == pytest.approx(torch.ones(12))
        assert found[1][0] == pytest.approx(torch.tensor([7.0, 6.0]).softmax(-1))


def test_a_models_tokens_go_where_they_are_sent_and_its_routers_learn() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = build(ModelSpec.model_validate(SPARSE), CPU)
    impose_routes(model, torch.tensor([[1, 4]]).expand(64, 2))
    tokens = torch.randint(128, (2, 32))
    with expert_loads(model) as loads:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert loads == [4.0, 4.0]
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {name for name, _ in model.named_parameters() if "mlp.gate" in name} <= touched
    for name, parameter in model.named_parameters():
        if name.endswith("experts.down_proj"):  # one tensor for all experts, as of version 5
            assert parameter.grad is not None
            assert parameter.grad.flatten(1).abs().sum(1).nonzero().flatten().tolist() == [1, 4]
        elif ".experts." in name and name.endswith("down_proj.weight"):
            assert (name in touched) == (name.split(".experts.")[1].split(".")[0] in {"1", "4"})


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        (DENSE | {"gated_mlp": False}, "no Llama model: gated_mlp"),
        (SPARSE | {"qk_norm": "none"}, "no OLMoE model: qk_norm"),
        (SPARSE | {"moe": SPARSE["moe"] | {"shared_expert_ffn_hidden_size": 8}}, "shared_expert_ffn_hidden_size"),
    ],
)
def test_a_model_of_another_family_is_refused(fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        config_of(ModelSpec.model_validate(fields))


def test_another_number_of_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    model = ModelSpec.model_validate(DENSE)
    build(model, CPU)
    monkeypatch.setattr(transformers_models, "parameter_shapes", lambda _: (torch.Size((3, 4)),))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has .* parameters, tiny as it is explored 12"):
        build(model, CPU)


@pytest.mark.parametrize("fields", [DENSE, SPARSE], ids=["llama", "olmoe"])
def test_transformers_own_model_is_trained_as_asked(fields: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    before = torch.get_default_dtype()
    model = ModelSpec.model_validate(fields)
    found = time_training(model, 2, "cpu", RoutingSpec(), 0)
    assert torch.get_default_dtype() is before
    assert isinstance(found, dict)
    assert found["outcome"] == "ok"
    assert found["attention"] == "sdpa"
    assert found["micro_step_seconds"] > 0
    assert found["optimizer_seconds"] > 0
    assert found["loss"] == pytest.approx(4.85, abs=0.3)  # log of the vocabulary: weights are small, tokens random
    assert (found["own_imbalance"] is None) == (model.moe is None)
    assert {parameter.dtype for parameter in build(model, CPU).parameters()} == {torch.bfloat16}


def test_out_of_memory_is_a_result_of_a_spoilt_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> nn.Module:
        raise torch.OutOfMemoryError("too much\nand more")

    monkeypatch.setattr(transformers_models, "build", refuse)
    found = time_training(ModelSpec.model_validate(DENSE), 1, "cpu", RoutingSpec(), 0)
    assert getattr(found, "value", None) == {"outcome": "out_of_memory", "reason": "too much"}


@pytest.mark.slow
def test_a_run_on_the_cpu_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    for name, value in CHILD_DEFAULTS.items():
        monkeypatch.setenv(name, value)
    config, out = tmp_path / "tiny.yaml", tmp_path / "out.json"
    config.write_text(json.dumps({"model": SPARSE, "batch_size": 8}))
    arguments = [str(config), "--device", "cpu", "--out", str(out), "--micro-batch-sizes", "2"]
    with Isolated() as isolated:  # one process for both runs, because importing transformers takes seconds
        monkeypatch.setattr(transformers_curve, "Isolated", lambda: nullcontext(isolated))
        assert main(arguments) == 0
        first = json.loads(out.read_text())
        assert main(arguments) == 0
    found = json.loads(out.read_text())
    assert [row["side"] for row in first["rows"]] == ["transformers", "composed", "whole"]
    assert found["rows"] == first["rows"], "nothing is measured again"
    assert set(found["summary"]["tiny"]["curves"]) == {"transformers", "whole", "composed"}
    assert set(found["summary"]["tiny"]["curves"]["whole"]) == {"2"}
