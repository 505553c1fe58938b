"""A package that is no part of the core plugs in by its name in one list; without it the core is whole."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from bexp.explorer.model import extensions
from bexp.explorer.model.base import Frozen, RuleError
from bexp.explorer.model.extensions import Extended
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.search_space import extension_for
from tests.explorer.shapes import shapes

MODEL = shapes(2, 64, 128, heads=4, vocab=256, length=64)
ALONE = """
import sys
from bexp.explorer.model import extensions
extensions.EXTENSIONS = ()
from bexp.explorer.answers.answer import answer_text
from bexp.explorer.exports.export import export
from bexp.explorer.records.recommendation import Recommendation
from bexp.explorer.records.trial import Trial
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.explorer.search.search_space import extension_for
request = ExplorationRequest.model_validate({"model": %r, "num_devices": 2, "batch_size": 8})
assert extension_for(request) is None
assert Trial.model_json_schema() and Recommendation.model_json_schema()
assert not [name for name in sys.modules if name.startswith("bexp.explorer.meshes")]
"""


class Share(Frozen):
    """A value of the core."""

    number: int


class Ring(Share):
    """One that the toy extension defines."""

    neighbours: int


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension that serves requests labelled `ring`."""

    def refuse(request: ExplorationRequest) -> None:
        if request.num_devices == 1:
            raise RuleError("a ring needs several devices", "num_devices")

    package: Any = ModuleType("toy_extension")
    package.record_types = lambda: (Ring,)
    package.rules_for = lambda request: (refuse,) if "ring" in request.labels else None
    package.models_of = lambda request: (request.shapes,) if "ring" in request.labels else None
    monkeypatch.setitem(sys.modules, "toy_extension", package)
    monkeypatch.setattr(extensions, "EXTENSIONS", ("toy_extension", *extensions.EXTENSIONS))


def request_of(**changes: Any) -> ExplorationRequest:
    return ExplorationRequest.model_validate({"model": MODEL, "num_devices": 2, "batch_size": 8, **changes})


def test_an_extension_has_the_rules_and_the_space_of_its_requests(toy: None) -> None:
    with pytest.raises(ValueError, match="a ring needs several devices"):
        request_of(num_devices=1, labels={"ring": "1"})
    extension = extension_for(request_of(labels={"ring": "1"}))
    assert extension is sys.modules["toy_extension"]
    assert extension_for(request_of()) is None
    assert extension_for(request_of(parallelism={"tensor": 2})) is sys.modules["bexp.explorer.meshes"]


def test_a_field_of_the_core_reads_and_writes_the_value_that_an_extension_defines(toy: None) -> None:
    class Holder(BaseModel):
        share: Annotated[Share, Extended()] | None = None

    held = Holder(share=Ring(number=2, neighbours=1))
    assert Holder.model_validate_json(held.model_dump_json()) == held
    assert "Ring" in Holder.model_json_schema()["$defs"]


def test_the_core_is_whole_without_an_extension() -> None:
    subprocess.run([sys.executable, "-c", ALONE % MODEL], check=True)
