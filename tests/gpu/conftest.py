from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bexp.kernels.poison import poisoned_memory


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New tensors hold NaN until they are written."""
    with poisoned_memory(warn_only=True):
        yield
