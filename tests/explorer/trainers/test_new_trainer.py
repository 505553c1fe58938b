"""What a new trainer costs: its file, and its entry in the list. All else knows it from there."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bexp.explorer.trainers.registry import FILES, TRAINERS

FOUND = """
import json, tempfile
from pathlib import Path

from bexp.explorer.trainers import all_trainers
from tests.explorer.trainers.toy import TOY

all_trainers.ALL_TRAINERS += (TOY,)

import yaml
from typer.testing import CliRunner

from bexp.api.app import create_app
from bexp.api.cli import app
from bexp.api.cli.exported_into import check_into, exported_into
from bexp.api.cli.tuned_command import TunedCommand
from bexp.api.settings import ServiceSettings
from bexp.explorer.exports.export import export
from bexp.explorer.formats.request import parse_request
from bexp.explorer.formats.training_files import find_trainer
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.trainer_terms import formats_for
from tests.explorer.exports.samples import CONFIG, candidate, exploration


def refusal(**changes):
    try:
        ExplorationRequest.model_validate({"hf_config": CONFIG, "hf_seq_length": 64, **changes})
    except ValueError as error:
        return str(error)


def help_of(*command):
    return CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "300"}).output


answer = exploration(candidate(recompute="full", execution="compile"), training={"precision": "pure"}, trainer="toy")
plain = exploration(candidate(recompute="full"), trainer="toy")
text = export("toy-yaml", plain).text
written = yaml.safe_load(text)
own = {"toy_model": "m", "rows": 2, "steps": 256, "tokens": 4096, "half": True, "color": "red"}
asked = parse_request({"toy": own, "model": {**CONFIG, "dtype": "bfloat16"}})
check_into("toy-yaml")
path = Path(tempfile.mkdtemp()) / "toy.yaml"
path.write_text(yaml.safe_dump(own, sort_keys=False))
schemas = create_app(ServiceSettings("sqlite://")).openapi()["components"]["schemas"]
print(json.dumps({
    "schema": ExplorationRequest.model_json_schema()["$defs"]["TrainerName"]["enum"],
    "openapi": schemas["TrainerName"]["enum"],
    "explore": help_of("explore"),
    "best": help_of("best"),
    "tune": help_of("tune"),
    "offered": formats_for(plain.recommendation, plain.request),
    "refused": refusal(trainer="toy", losses=["chunked"]),
    "hint": refusal(trainer="deepspeed", attention_backends=["flash"], recompute=["layers_2"]),
    "able": refusal(trainer="megatron", training={"lora": {"r": 4, "target_modules": "all-linear"}}),
    "header": export("toy-yaml", plain).header,
    "written": written,
    "whose": find_trainer(own, None),
    "read": [asked.trainer, asked.base_micro_batch_size, asked.batch_size, asked.seq_length, asked.hf_config["dtype"]],
    "notices": parse_request({"toy": {**own, "speed": 3}, "model": CONFIG}).notices,
    "into": exported_into(path, "toy", text, asked)[0],
    "tuned": TunedCommand(["toy-train", "run.yaml"]).changes({"per_device_train_batch_size": 8}, {}),
}))
"""


@cache
def found() -> dict[str, Any]:
    """Where a process that has it in the list finds the toy trainer."""
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", FOUND], capture_output=True, text=True, cwd=root, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


def test_its_name_is_in_the_schema_and_in_the_help() -> None:
    assert found()["schema"][-1] == found()["openapi"][-1] == "toy"
    assert " or toy" in " ".join(found()["explore"].split())
    last = TRAINERS[[*FILES][-1]].title
    assert f"{last} or Toy" in " ".join(found()["explore"].split()), "files that are read"
    assert "toy-yaml" in found()["best"]
    last = [TRAINERS[name].title for name, file in FILES.items() if file.program is not None][-1]
    assert f"{last} or Toy" in found()["tune"]


def test_what_it_cannot_express_is_refused_and_it_is_named_where_it_can() -> None:
    assert "Toy cannot express the chunked loss; these can: bexp" in found()["refused"]
    assert ", toy" not in found()["hint"]
    assert ", toy" in found()["able"]


def test_an_answer_is_written_by_its_keys() -> None:
    assert "toy-yaml" in found()["offered"]
    assert found()["written"] == {
        **{"rows": 8, "steps": 64, "tokens": 4096, "solver": "adamw_torch_fused"},
        **{"half": True, "recompute": True},
    }
    assert found()["header"][0].startswith("bexp export 'toy-yaml'")
    assert any("expect about" in line for line in found()["header"])


def test_a_persons_file_is_read_by_the_same_keys() -> None:
    assert found()["whose"] == "toy"
    assert found()["read"] == ["toy", 2, 512, 4096, "bfloat16"]
    assert any("not known here what they change: speed" in notice for notice in found()["notices"])


def test_the_answer_is_written_into_a_persons_file_and_command() -> None:
    assert "rows: 8\nsteps: 64\n" in found()["into"]
    assert "color: red" in found()["into"]
    assert found()["tuned"] == ["add rows: 8 to run.yaml"]


@pytest.mark.parametrize("term", ["colour", "losses"])
def test_a_term_that_is_not_known_raises_where_the_trainer_is_made(term: str) -> None:
    from bexp.explorer.trainers.trainer import expresses

    with pytest.raises(TypeError, match=f"'{term}'.* is nothing that a trainer can express"):
        expresses(**{term: ()})
