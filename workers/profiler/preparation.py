"""What an idle process does so that its next job waits for less: it imports libraries and runs the checks of back ends.

The check of a back end runs a small example, whose kernels hardly depend on the model. On an H100 whose kernels were
not built yet, all checks of a mixture-of-experts model took 27 s; in a process that has run them before, 0.1 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

import torch

from bexp.kernels.attention import attention_support
from bexp.kernels.experts.registry import expert_backends
from bexp.kernels.shapes import AttentionShape, ExpertsShape
from workers.profiler.instruments import freeze_imports
from workers.profiler.parent import CommandQueue
from workers.targets.choice import preload_targets

ATTENTION = tuple(
    AttentionShape(num_heads=8, num_query_groups=8, head_size=size, dtype=torch.bfloat16, seq_length=1024)
    for size in (64, 128)
)
EXPERTS = ExpertsShape(hidden_size=1024, ffn_hidden_size=1024, num_experts=8, top_k=2, dtype=torch.bfloat16)
"""What most models are like. Other shapes need few other kernels for their checks."""


def prepare(commands: CommandQueue, device: torch.device | None) -> None:
    """Import what a job may need; then run the checks of back ends on `device`, if it is a GPU. A command ends this."""
    do_until_asked(commands, (preload_targets, freeze_imports))
    if device is not None and device.type == "cuda":
        with suppress(RuntimeError):  # others hold all of the memory, for instance; a job will see for itself
            do_until_asked(commands, kernel_checks(device))


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
