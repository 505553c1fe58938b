"""What the target holds between its parts and the whole model."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from explorer.spec.candidate import Candidate
from tests.workers.targets.transformers.targets import HARDWARE, open_target, request_for

pytest.importorskip("transformers")


def test_memory_is_settled_after_the_parts_are_gone_and_before_there_is_a_whole_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = open_target()
    parts = target.report(HARDWARE).parts
    assert parts is not None
    weight = weakref.ref(next(target._parts().skeleton.model.parameters()))
    assert target.rest() > 0
    found: list[tuple[bool, dict[str, Any]]] = []
    monkeypatch.setattr(target._instruments, "settle", lambda **asked: found.append((weight() is None, asked)))
    candidate = Candidate(micro_batch_size=1, attention_backend="sdpa", num_query_groups=1)
    with target.training_run(candidate, parts, request_for()):
        assert found == [(True, {"release": True})]
        assert target.rest() == 0
