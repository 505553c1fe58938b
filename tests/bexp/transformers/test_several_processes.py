from __future__ import annotations

import multiprocessing

from torch.multiprocessing.spawn import spawn

from tests.bexp.test_step_exploration import free_port
from tests.bexp.transformers import ranks


def test_gradients_under_ddp_and_fully_shard_are_those_of_the_plain_model() -> None:
    with multiprocessing.Manager() as manager:
        answers = manager.dict()
        spawn(ranks.train, args=(free_port(), answers), nprocs=2)
        found = dict(answers)
    assert set(found) == {(rank, wrap) for rank in (0, 1) for wrap in ("ddp", "fully_shard")}
    assert max(found.values()) <= 5e-5, found
