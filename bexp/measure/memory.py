"""The bytes that a module's forward saves for backward, and the peak of its passes."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from bexp.measure.memory_meters import byte_meter
from bexp.measure.passes import MeteredPasses, join_gradients


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes over the level before the forward.

    `saved` includes the output, which is the next layer's input and is not counted there again. The gradients of the
    inputs are counted. Parameters, their gradients, the inputs and the incoming gradients are not, because they belong
    to others. In eval mode `saved` is the output alone and `backward_peak` is 0.
    """

    saved: int
    forward_peak: int
    backward_peak: int


def measure_memory(passes: MeteredPasses, device: torch.device) -> ActivationBytes:
    """Run one forward and backward under a meter, without recomputation of the whole module.

    On CUDA, the caller must have run the passes once before, so that the libraries' workspaces exist already.
    """
    gc.collect()
    passes.release()
    passes.prepare_forward()
    with passes.without_recomputation(), byte_meter(device, passes.existing_tensors()) as meter:
        meter.reset_peak()
        base = meter.level()
        outputs = passes.metered_forward()
        saved, forward_peak = meter.level() - base, meter.peak() - base
        if not passes.training:
            return ActivationBytes(saved, forward_peak, 0)
        meter.reset_peak()
        losses = [output for output in outputs if output.dim() == 0]
        states = [output for output in outputs if output.dim() > 0]
        incoming = sum(output.numel() * output.element_size() for output in states)
        if states:
            losses.append(join_gradients(states))
        del outputs, states
        torch.autograd.backward(losses)
        return ActivationBytes(saved, forward_peak, max(0, meter.peak() - base - incoming))
