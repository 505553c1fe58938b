"""Memory that shows whether a kernel wrote all that it owes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory(*, warn_only: bool = False) -> Iterator[None]:
    """New tensors hold NaN until they are written, since deterministic mode fills them so.

    References are computed outside of it: cuBLAS objects to this mode. If `warn_only`, an operation that is not
    deterministic warns, and does not raise.
    """
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # not in its stubs
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
