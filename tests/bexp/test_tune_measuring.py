"""The peaks of sizes that are measured one after the other in one process."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch

from bexp.tune import measuring, own_loop
from bexp.tune.measuring import peak_bytes, reset_peak
from bexp.tune.own_loop import _parameters

CPU = torch.device("cpu")
LARGE = 100 << 20
PIECE = 1 << 16
"""Small enough for the heap, and larger than most holes that other tests have left there: their edges are resident."""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts nothing anew")
def test_a_size_has_a_peak_of_its_own_whatever_larger_ones_have_left_behind() -> None:
    reset_peak(CPU)
    before, _ = peak_bytes(CPU)
    texts = [b"-" * PIECE for _ in range(LARGE // PIECE)]
    after_it = b"-" * PIECE  # so that the heap does not shrink by itself
    cycle: list[object] = [texts]
    cycle.append(cycle)
    del texts, cycle
    large, _ = peak_bytes(CPU)
    assert large - before > 0.9 * LARGE
    reset_peak(CPU)
    assert peak_bytes(CPU)[0] - before < 0.1 * LARGE
    assert after_it


def test_an_optimizer_that_a_trainer_drops_is_gone_with_its_state() -> None:
    loop = own_loop._Loop()
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    measuring.serving.append(object())
    try:
        loop.before_step(optimizer)
        loop.after_step(optimizer)
    finally:
        measuring.serving.pop()
    kept = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert kept() is None


def test_the_optimizer_that_steps_counts_even_if_the_command_has_frozen_its_objects() -> None:
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    first, second = (torch.optim.SGD(layer.parameters(), 0.1) for layer in layers)
    both = {id(parameter) for layer in layers for parameter in layer.parameters()}
    assert both <= {id(parameter) for parameter in _parameters(first, torch.optim.Optimizer)}
    gc.freeze()
    try:
        alone = _parameters(second, torch.optim.Optimizer)
    finally:
        gc.unfreeze()
    assert {id(parameter) for parameter in layers[1].parameters()} == {id(parameter) for parameter in alone}
