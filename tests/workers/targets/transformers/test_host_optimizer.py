"""An optimizer that steps in the host's memory, in place of torchao's, which needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bexp.explorer.cost.step import static_parts
from bexp.explorer.model.optimizers import OptimizerName
from bexp.measure import host_limits
from bexp.transformers.recompute import pinned_bytes
from bexp.workers.instruments.failures import UnsupportedTrialError
from bexp.workers.targets.transformers.training_run import LEARNING_RATE, TrainerOptimizer
from tests.bexp.kernels.references import assert_same_values
from tests.workers.targets.transformers.targets import HARDWARE, candidate, changed_by_a_step, open_target, opened

pytest.importorskip("transformers")

NAME: OptimizerName = "adamw_cpu_offload"
OPTIMIZER: dict[str, Any] = {"training": {"optimizer": {"name": NAME}}}
FEWEST = 4096
"""Parameters with fewer numbers are stepped on the device."""


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """What torchao's does, by its names, without streams and pinned memory."""

    def __init__(self, params: list[nn.Parameter], optimizer_class: Any, **kwargs: Any) -> None:
        self.param_d2h_map: dict[Tensor, Tensor] = {}
        self.optim_dict: dict[Tensor, torch.optim.Optimizer] = {}
        self.queue: dict[Tensor, None] = {}
        small = [p for p in params if p.numel() < FEWEST]
        for p in params:
            if p.numel() >= FEWEST:
                host = p.detach().clone()
                host.grad = torch.zeros_like(host)
                self.param_d2h_map[p], self.optim_dict[p] = host, optimizer_class([host], **kwargs)
                p.register_post_accumulate_grad_hook(self._take)
        self.d_opt = optimizer_class(small, **kwargs) if small else None

    def _take(self, p: Tensor) -> None:
        self.param_d2h_map[p].grad = p.grad.clone() if p.grad is not None else None
        self.queue[p] = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns nothing
        if self.d_opt is not None:
            self.d_opt.step()
        for p in self.queue:
            self.optim_dict[p].step()
            p.copy_(self.param_d2h_map[p])
        self.queue.clear()


@pytest.fixture(autouse=True)
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(CPUOffloadOptimizer=CPUOffloadOptimizer)
    monkeypatch.setattr("bexp.workers.targets.transformers.training_run.import_module", lambda _: package)


def test_the_device_holds_the_state_of_small_parameters_alone() -> None:
    target, parts, request = opened(**OPTIMIZER)
    model = target._resolved.model
    layer = target._parts().layer(parts.layers[0], 1).module
    assert not any(p._post_accumulate_grad_hooks for p in layer.parameters()), (
        "layers that are timed take nothing there"
    )
    small = sum(p.numel() for p in model.parameters() if p.numel() < FEWEST)
    large = [p for p in model.parameters() if p.numel() >= FEWEST]
    steps = 4 * len(list(model.parameters()))
    assert parts.optimizer_state_bytes is not None
    assert 2 * 2 * small <= parts.optimizer_state_bytes <= 2 * 2 * small + steps
    on_host = sum(2 * pinned_bytes(p) + 2 * 2 * p.numel() for p in large)  # weight and gradient, and two moments
    assert parts.optimizer_host_bytes is not None
    assert on_host <= parts.optimizer_host_bytes <= on_host + steps
    assert static_parts(parts, request).optimizer_states == parts.optimizer_state_bytes


def test_a_host_without_room_ends_the_exploration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits, "available_bytes", lambda: 1000)
    with pytest.raises(UnsupportedTrialError, match=rf"optimizer '{NAME}' needs 0\.00 GiB of the host's memory"):
        open_target(**OPTIMIZER).report(HARDWARE)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_step_takes_gradients_to_the_host_and_clips_none(keeps: bool) -> None:
    start = torch.randn(64, 64)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = TrainerOptimizer([ours], NAME, keeps_gradients=keeps)
    plain = torch.optim.AdamW([theirs], lr=LEARNING_RATE, weight_decay=0.0)
    if keeps:  # measured alone: nothing has run backward
        ours.grad = torch.full_like(ours, 5.0)
        theirs.grad = torch.full_like(ours, 10.0)  # backward adds the gradient to the one that is there
    else:
        (5.0 * ours).sum().backward()
        (5.0 * theirs).sum().backward()
    optimizer.step()
    plain.step()
    assert not torch.equal(ours, start)
    assert_same_values([ours], [theirs])


def test_a_whole_model_trains_with_it() -> None:
    target, parts, request = opened(**OPTIMIZER)
    with target.training_run(candidate(), parts, request) as run:
        changed = list(changed_by_a_step(run).values())
    assert changed.count(True) > len(changed) // 2, "norms change by less than bfloat16 tells"
