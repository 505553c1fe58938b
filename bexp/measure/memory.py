"""What a block's forward leaves alive, and how high its passes reach."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from bexp.measure.memory_meters import byte_meter
from bexp.measure.passes import BlockPasses, join_gradient, not_recomputed


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Bytes over the level before the forward.

    `saved` includes the output: it is the next block's input, and counted there no more. Parameters, their gradients,
    the inputs and the incoming gradient belong to others and are not counted; the gradient of the input is. In eval
    mode `saved` is the output alone and `backward_peak` 0.
    """

    saved: int
    forward_peak: int
    backward_peak: int


def measure_memory(passes: BlockPasses, device: torch.device) -> ActivationBytes:
    """Run one forward and backward under a meter, without recomputation of the whole block.

    On CUDA the libraries' workspaces must exist already.
    """
    gc.collect()
    passes.release()
    passes.prepare_forward()
    with not_recomputed(passes.block), byte_meter(device, passes.existing_tensors()) as meter:
        meter.reset_peak()
        base = meter.level()
        output = passes.metered_forward()
        saved, forward_peak = meter.level() - base, meter.peak() - base
        if not passes.training:
            return ActivationBytes(saved, forward_peak, 0)
        meter.reset_peak()
        incoming = 0 if output.dim() == 0 else output.numel() * output.element_size()
        loss = output if output.dim() == 0 else join_gradient(output)
        del output
        torch.autograd.backward(loss)
        return ActivationBytes(saved, forward_peak, max(0, meter.peak() - base - incoming))
