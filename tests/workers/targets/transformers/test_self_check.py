"""Some of the library's types, by parts, against the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bexp.workers.targets.transformers.config import quiet_library, resolve_config
from bexp.workers.targets.transformers.kinds import find_layers, kind_names
from bexp.workers.targets.transformers.model import META, BuildSettings, build_model
from bexp.workers.targets.transformers.parts_comparison import PartsComparison
from bexp.workers.targets.transformers.self_check import PARTS, self_check
from bexp.workers.targets.transformers.shrink import TINY_SEQ_LENGTH, tiny_config

pytest.importorskip("transformers")

DENSE = ("gpt2", "gemma3_text", "bloom", "mamba", "diffllama")
EXPERTS = ("olmoe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("model_type", (*DENSE, *EXPERTS))
def test_parts_compute_what_the_whole_model_computes(model_type: str) -> None:
    resolved = resolve_config({"model_type": model_type}, TINY_SEQ_LENGTH)
    model = build_model(resolved, BuildSettings(), META)
    check = self_check(tiny_config(resolved, kind_names(find_layers(model), model.config)))

    assert {name: check.failures.get(name) for name in PARTS} == dict.fromkeys(PARTS)
    assert "padded_text" not in check.failures
    assert "checkpointing" not in check.failures
    assert ("experts_interface" not in check.failures) == (model_type in EXPERTS)
    assert ("batch_tiles" in check.failures) == (model_type == "bloom")  # alibi is laid out batch x heads first
    assert all(check.saved_bytes_per_token[kind] > 0 for kind in check.kinds)


def test_dropout_of_adapters_is_off_in_the_check() -> None:
    """Its random numbers would differ between parts and the whole."""

    def drops(model: Any) -> None:
        mlp = model.model.layers[0].mlp
        mlp.down_proj = nn.Sequential(nn.Dropout(0.5), mlp.down_proj)

    resolved = resolve_config({"model_type": "llama"}, TINY_SEQ_LENGTH)
    assert self_check(tiny_config(resolved), drops).by_parts


def test_layers_of_many_parameters_are_gone_through_once() -> None:
    """Some have an adapter for each of a hundred languages."""

    class Counted(list[nn.Module]):
        num_passes = 0

        def __iter__(self) -> Iterator[nn.Module]:
            self.num_passes += 1
            return super().__iter__()

    tiny = tiny_config(resolve_config({"model_type": "llama"}, TINY_SEQ_LENGTH))
    settings = BuildSettings(dtype=torch.float32)
    model = build_model(tiny, settings, torch.device("cpu"))
    comparison = PartsComparison(tiny, settings, model, find_layers(model))
    comparison.followed_outputs = dict.fromkeys(comparison.kinds, (0,))
    comparison.layers = layers = Counted(comparison.layers)

    with quiet_library():
        comparison.replay_all(1)
    assert layers.num_passes < len(list(layers[0].parameters()))


def test_layers_that_a_model_calls_repeatedly_are_no_parts() -> None:
    resolved = resolve_config({"model_type": "hrm_text"}, TINY_SEQ_LENGTH)

    check = self_check(tiny_config(resolved))

    assert check.runs
    assert not check.by_parts
    assert "times in a forward pass" in check.failures["layers"]
