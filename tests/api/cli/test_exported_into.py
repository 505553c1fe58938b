"""An answer in a file that names another file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bexp.api.cli.errors import CommandError
from bexp.api.cli.exported_into import exported_into
from bexp.api.cli.files import read_document
from bexp.api.cli.options import build_request
from bexp.explorer.exports.export import export
from tests.explorer.exports.samples import candidate, exploration
from tests.explorer.formats.trainer_files import CONFIG, LLAMAFACTORY_ZERO3

FSDP = LLAMAFACTORY_ZERO3.replace("deepspeed: zero3.json", "fsdp: full_shard\nfsdp_config: fsdp.json")


@pytest.mark.parametrize("recomputes", [False, True])
def test_keys_of_fsdp_stay_in_their_file_unless_one_of_them_changes(tmp_path: Path, recomputes: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "fsdp.json").write_text(json.dumps({"version": 2, "activation_checkpointing": recomputes}))
    path = tmp_path / "train.yaml"
    path.write_text(FSDP)
    asked = build_request(
        path, read_document(path), {"trainer": "llamafactory", "num_devices": 2}, model=tmp_path / "config.json"
    )
    answer = exploration(candidate(1, expert_backend=None))
    exported = export("llamafactory", replace(answer, request=asked)).text
    if recomputes:
        with pytest.raises(CommandError, match=r"fsdp\.json is a file: put its keys here, below fsdp_config"):
            exported_into(path, "llamafactory", exported, asked)
    else:
        text, _ = exported_into(path, "llamafactory", exported, asked)
        assert "fsdp_config: fsdp.json" in text
