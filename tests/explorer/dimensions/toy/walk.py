"""Follows a toy dimension through a copy of the product, in a process that imports that copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sqlalchemy as sa
from torch import nn
from typer.testing import CliRunner

import bexp
from bexp.api.cli import app
from bexp.explorer.answers.answer import Explored, answer_text
from bexp.explorer.answers.lines import render
from bexp.explorer.cost.components import ComponentKind
from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.exports.export import export
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.records.event import EventCode
from bexp.explorer.records.recommendation import RelaxationKind
from bexp.explorer.request.request import ExplorationRequest, reported_place
from bexp.explorer.search.component_subjects import IRRELEVANT
from bexp.explorer.search.explore import explore
from bexp.explorer.search.relaxations import single_changes
from bexp.explorer.search.study import params_of
from bexp.explorer.trainers.registry import TRAINERS
from bexp.storage.database import open_database
from bexp.storage.queue import Queue
from bexp.storage.schema import upgrade
from bexp.storage.tables import recommendations
from bexp.trainer.recommended_setup import RecommendedSetup
from bexp.transformers.set_up import set_up
from bexp.transformers.settings import Settings
from tests.contracts.samples import make_worker
from tests.explorer.cost import described
from tests.explorer.simulator import SimulatedDevice


class Device(SimulatedDevice):
    """A device whose layers take a fifth less time with a toy."""

    def seconds(self, component, model):  # type: ignore[no-untyped-def]  # as the simulator has them
        device, host = super().seconds(component, model)
        share = 0.8 if "toy=on" in component.key else 1.0
        return share * device, share * host


def main() -> None:
    """Assert at each place that it knows of the toy."""
    assert ExplorationRequest.model_json_schema()["properties"]["toys"]["description"] == (
        "Whether layers have a toy. Null: both."
    )
    assert "toys" in CliRunner().invoke(app, ["explore", "--help"], env={"COLUMNS": "200"}).output
    assert "toys" in IRRELEVANT
    one = {"recompute": ["none"], "attention_backends": ["flash"], "expert_backends": ["grouped_mm"]}
    asked = described.request(toys=["off", "on"], micro_batch_size=[1, 2], batch_size=4, **one)
    bare, parts = described.device(), described.parts()
    refused = list(explore(asked, bare, Device(asked)))[-1].answer
    assert refused is not None
    assert "cannot be set" in str(refused.variants[0].reason), "a target that sets no toy measures none"
    with pytest.raises(ValueError, match="a toy is for training"):
        described.request(toys=["on"], mode="eval")
    changes = single_changes(asked, reported_place(asked, bare, parts))[RelaxationKind.OPTIONS]
    assert "every toy" in [change.words for change in changes]
    assert TRAINERS["trl"].lacks("toy", "on") == "the toy on"
    supports = tuple(BackendSupport(name=name, usable=True) for name in ("off", "on"))
    report = bare.model_copy(update={"choices": {"toy": supports}})

    queue = Queue(open_database(f"sqlite:///{Path.cwd()}/toy.db"))
    upgrade(queue.database)
    job, _ = queue.enqueue(asked)
    claim = queue.claim(make_worker(targets={asked.target_name: ""}))
    assert claim is not None
    queue.pin(claim.lease, report)

    steps = []
    for step in explore(asked, report, Device(asked)):
        steps.append(step)
        if step.answer is None:
            queue.record(claim.lease, step)
    answer = steps[-1].answer
    assert answer is not None
    best = answer.variants[0].recommendation
    assert best is not None
    assert best.candidate.model_dump()["toy"] == "on"
    assert "toy=on" in best.candidate.describe()
    assert params_of(best.candidate)["toy"] == "on"
    messages = [event.message for step in steps for event in step.events]
    assert any("toy=off" in message for message in messages), "the base has no toy"
    (space,) = (event.data for step in steps for event in step.events if event.code is EventCode.SPACE)
    assert space["toy"] == ["off", "on"]
    text = answer_text(Explored(job.id, asked, report), best, answer)
    assert text is not None
    assert ["toy", "on"] in [line.split() for line in render(text).splitlines()]

    with queue.database.read() as connection:
        row = connection.execute(sa.select(recommendations).order_by(recommendations.c.seq.desc()).limit(1)).one()
    assert row.candidate["toy"] == "on"

    follow(ExportSource(job.id, asked, report, best), parts)


def follow(source: ExportSource, parts: ModelParts) -> None:
    """Assert it of the components, an export and `bexp.apply`."""
    asked, best = source.request, source.recommendation
    assert asked is not None
    assert best is not None
    decompose = Decomposer(parts, training=True)
    other = best.candidate.model_copy(update={"toy": "off"})
    keys, plain = ([c.key for c in decompose(one).components] for one in (best.candidate, other))
    shared = set(keys) & set(plain)
    assert all(key.startswith(ComponentKind.LAYER.value) for key in {*keys, *plain} - shared)
    assert any(key.startswith(ComponentKind.SHELL.value) for key in shared), "the toy enters layers alone"

    assert "toy=on" in "\n".join(export("python", source).header)
    assert [name for name, one in TRAINERS.items() if "on" in one.expresses["toy"]] == ["bexp"]

    document = {"request": asked.model_dump(mode="json"), "recommendation": best.model_dump(mode="json")}
    setup = RecommendedSetup.read(json.loads(json.dumps(document)))
    assert setup.settings.others == (("toy", "on"),)
    module = nn.Linear(1, 1)
    applied = set_up(module, Settings.of({"toy": "on"}))
    assert "toy: on" in applied.done
    assert module.toy == "on"
    assert bexp.__file__ is not None


main()
