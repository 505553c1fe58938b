"""Float8 as it is measured: how far off a layer is, and what ends as unsupported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.targets.transformers.results import compare_float8
from tests.bexp.transformers import fake_torchao
from tests.workers.targets.transformers.targets import HARDWARE, QWEN_MOE, candidate, open_target, request_for

pytest.importorskip("transformers")

FLOAT8: dict[str, Any] = {"training": {"precision": "float8_tensorwise"}}


def test_a_layers_error_is_stated_and_the_whole_model_runs_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchao.install(monkeypatch)
    number = 2 * 4  # of attention in two layers; experts stay as they are
    target = open_target(QWEN_MOE, **FLOAT8)
    report = target.report(HARDWARE)
    parts = report.parts
    assert parts is not None
    assert parts.float8 is not None
    assert parts.float8.num_linear == number
    assert 0.002 < parts.float8.output_error < 0.1
    assert 0.002 < parts.float8.gradient_error < 0.2
    with target.training_run(
        candidate(expert_backend=report.default_experts), parts, request_for(QWEN_MOE, **FLOAT8)
    ) as run:
        kinds = [type(module) for module in run._model.modules()]
        assert kinds.count(fake_torchao.Float8Linear) == number
        run.begin()


def test_layers_that_round_nothing_are_not_off(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchao.install(monkeypatch)

    def unchanged(tensor: Tensor) -> Tensor:
        return tensor

    monkeypatch.setattr(fake_torchao, "rounded", unchanged)
    found = compare_float8(open_target()._parts(), "rowwise")
    assert max(found.output_error, found.gradient_error) <= torch.finfo(torch.bfloat16).eps
    monkeypatch.setattr(fake_torchao, "rounded", lambda tensor: 0.0 * tensor)
    found = compare_float8(open_target()._parts(), "rowwise")
    assert found.output_error > 0.3, "what attention and the FFN add to the hidden states is gone"


def test_what_cannot_compute_float8_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedTrialError, match=r"float8 \(tensorwise\) cannot be had here: float8 needs torchao"):
        monkeypatch.setattr("bexp.transformers.float8.import_module", lambda name: __import__("no_such_" + name))
        open_target(**FLOAT8).report(HARDWARE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    builder: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(UnsupportedTrialError, match=r"capability 8\.9 or later; this one has 8\.0"):
        compare_float8(builder, "tensorwise")
    fake_torchao.install(monkeypatch)
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 160, "n_positions": 64}
    with pytest.raises(UnsupportedTrialError, match="no decoder layer has linear layers that float8 could compute"):
        open_target(config, **FLOAT8).report(HARDWARE)
