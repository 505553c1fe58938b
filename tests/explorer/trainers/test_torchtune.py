"""torchtune: what is read of a recipe."""

from __future__ import annotations

from tests.explorer.formats.test_trainer_files import read


def test_compilation_and_loss_of_torchtune() -> None:
    assert (read("torchtune").execution, read("torchtune").losses) == ("compile", ("chunked",))
    plain = read("torchtune", loss___component_="torch.nn.CrossEntropyLoss", compile=False)
    assert (plain.execution, plain.losses) == (None, ("library",))
    assert any("no export" in notice for notice in plain.notices)
