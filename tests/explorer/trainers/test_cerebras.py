"""The Cerebras Model Zoo: an export is read as a configuration."""

from __future__ import annotations

import pytest
import yaml

from bexp.explorer.exports.export import export
from bexp.explorer.formats.request import parse_request
from bexp.explorer.request.request import ExplorationRequest
from tests.explorer.exports.samples import candidate, exploration


@pytest.mark.parametrize("tile", [None, 2])
def test_a_cerebras_export_is_read_back_as_what_was_asked(tile: int | None) -> None:
    document = yaml.safe_load(export("cerebras", exploration(candidate(bta_tile=tile), num_devices=2)).text)
    document["trainer"]["init"]["model"] = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "filter_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 32,
    }
    request = parse_request(document)
    assert isinstance(request, ExplorationRequest)
    assert (request.micro_batch_size, request.batch_size, request.num_devices) == (8, 512, 2)
    assert (request.bta.enable, request.bta.max_tile) == (tile is not None, tile)
