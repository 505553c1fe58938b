"""TRL: its loss."""

from __future__ import annotations

from typing import Any

from tests.explorer.formats.test_trainer_files import read


def test_the_loss_in_chunks_of_trl_is_said_not_to_be_measured() -> None:
    changes: tuple[dict[str, Any], ...] = ({}, {"loss_type": "chunked_nll"})
    for change in changes:
        asked = read("trl", **change)
        assert asked.losses == ("library",)
        assert any("is not measured" in notice and "sets loss_type: nll" in notice for notice in asked.notices)
    assert not any("chunked_nll" in notice for notice in read("trl", loss_type="nll").notices)
