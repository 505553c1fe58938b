"""What an idle process does so that its next job waits for less: it imports libraries and runs the checks of back ends.

The check of a back end runs a small example, whose kernels hardly depend on the model. On an H100 whose kernels were
not built yet, all checks of a mixture-of-experts model took 27 s; in a process that has run them before, 0.1 s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

import torch

from bexp.kernels.attention import attention_support
from bexp.kernels.experts.registry import expert_backends
from bexp.kernels.shapes import AttentionShape, ExpertsShape
from bexp.workers.profiler.failures import is_poisoned
from bexp.workers.profiler.instruments import Instruments, freeze_imports
from bexp.workers.profiler.parent import CommandQueue, end_group
from bexp.workers.targets.choice import target_imports

_log = logging.getLogger(__name__)

ATTENTION = tuple(
    AttentionShape(num_heads=8, num_query_groups=8, head_size=size, dtype=torch.bfloat16, seq_length=1024)
    for size in (64, 128)
)
EXPERTS = ExpertsShape(hidden_size=1024, ffn_hidden_size=1024, num_experts=8, top_k=2, dtype=torch.bfloat16)
"""What most models are like. Other shapes need few other kernels for their checks."""


def prepare(commands: CommandQueue, instruments: Instruments | None) -> None:
    """Import what a job may need; then run the checks of back ends on the device, if it is a GPU. A command ends this.

    The memory that the checks took is given back. If one of them left the device unusable, this process is killed, so
    that the parent starts another one for the job; with an exit status of its own, the job would end.
    """
    do_until_asked(commands, (*target_imports(), freeze_imports))
    if instruments is None or instruments.device.type != "cuda" or not commands.empty():
        return
    with suppress(Exception):  # others hold all of the memory, for instance; a job will see for itself
        do_until_asked(commands, kernel_checks(instruments.device))
    if is_poisoned(instruments.device):
        _log.error("the check of a back end left %s unusable", instruments.device)
        end_group()
    instruments.settle(release=True)


def do_until_asked(commands: CommandQueue, steps: Iterable[Callable[[], object]]) -> None:
    """Take the steps in their order, until a command waits."""
    for step in steps:
        if not commands.empty():
            return
        step()


def kernel_checks(device: torch.device) -> Iterator[Callable[[], object]]:
    """The checks of all back ends, each of which builds the kernels that it runs."""
    for shape in ATTENTION:
        yield partial(attention_support, shape, device)
    for backend in expert_backends():
        yield partial(backend.unsupported_reason, EXPERTS, device)
