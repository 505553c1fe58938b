"""liger-kernel in the files of trainers: Axolotl's plugin and the fields of TrainingArguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bexp.explorer.dimensions.kernels import KERNELS, Kernels
from bexp.explorer.dimensions.loss import LOSS
from bexp.explorer.exports.export import export
from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request
from bexp.explorer.trainers.axolotl import LIGER_PLUGIN
from bexp.explorer.trainers.document import ExportError
from tests.explorer.exports.samples import candidate, exploration
from tests.explorer.formats.test_trainer_files import read, refusal
from tests.explorer.trainers.test_trainer import LIBRARY, build
from tests.explorer.trainers.test_trainer import refusal as refused_request

LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 128, "vocab_size": 256},
}
DENSE: dict[str, Any] = {"hf_config": LLAMA, "hf_seq_length": 64}
LAYERS: dict[str, Any] = {"liger_rope": True, "liger_rms_norm": True, "liger_glu_activation": True}
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


def test_ligers_kernels_of_a_file_stay_and_are_its_base() -> None:
    named = read("axolotl", plugins=[LIGER_PLUGIN], **LAYERS, liger_fused_linear_cross_entropy=True)
    assert (named.kernels, named.losses) == (("liger",), ("liger",))
    older = read("axolotl", plugins=[LIGER_PLUGIN], liger_swiglu=True, liger_layer_norm=True)
    assert (older.kernels, older.losses) == (("liger",), None)
    idle = read("axolotl", **LAYERS)
    assert (idle.kernels, idle.losses) == (None, None)
    for key in LAYERS:
        assert any(f"{key} does nothing without plugins" in notice for notice in idle.notices)


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"plugins": [LIGER_PLUGIN, CUT]}, "plugins", "remove axolotl.integrations.cut_cross_entropy"),
        ({"plugins": "liger"}, "plugins", "remove liger"),
        ({"liger_rope": True, "liger_rms_norm": False}, "liger_rms_norm", "contradicts liger_rope"),
        ({"liger_cross_entropy": True}, "liger_cross_entropy", "not measured"),
    ],
)
def test_what_liger_would_do_otherwise_than_measured_is_refused(
    changes: dict[str, Any], field: str, reason: str
) -> None:
    assert reason in refusal("axolotl", **{"plugins": [LIGER_PLUGIN], **changes})[f"axolotl.{field}"]


@pytest.mark.parametrize(("kernels", "loss"), [("liger", "liger"), ("liger", "library"), ("library", "liger")])
def test_ligers_kernels_are_written_as_they_are_read(kernels: str, loss: str, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    answer = exploration(candidate(expert_backend=None, kernels=kernels, loss=loss), **DENSE)
    fields = yaml.safe_load(export("axolotl", answer).text)
    again = read("axolotl", **{key: value for key, value in fields.items() if key == "plugins" or "liger" in key})
    found = (again.kernels or ("library",), again.losses or ("library",))
    assert found == ((kernels,), (loss,))
    arguments = json.loads(export("transformers", answer).text)
    named = {key: value for key, value in arguments.items() if "liger" in key}
    told = TrainingArguments(str(tmp_path), use_cpu=True, **named)
    assert told.use_liger_kernel
    assert told.liger_kernel_config == named["liger_kernel_config"]
    side = parse_request({"model": LLAMA, "training_arguments": {"bf16": True, **named}})
    assert (side.kernels, side.losses) == ((kernels,), (loss,))


def test_training_arguments_turn_all_of_liger_on_by_one_field() -> None:
    def side(**arguments: Any) -> Any:
        return parse_request({"model": LLAMA, "training_arguments": {"bf16": True, **arguments}})

    whole = side(use_liger_kernel=True)
    assert (whole.kernels, whole.losses) == (("liger",), ("liger",))
    off = side(use_liger_kernel=False, liger_kernel_config={"rope": False})
    assert (off.kernels, off.losses) == (None, None)
    layers = side(use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": False})
    assert (layers.kernels, layers.losses) == (("liger",), ("library",))
    for config, reason in (
        ({"rope": False}, "measured together"),
        ({"swiglu": False}, "measured together"),
        ({"cross_entropy": True}, "not measured"),
        ({"moe": True}, "not a known field"),
    ):
        with pytest.raises(FormatError, match=reason):
            side(use_liger_kernel=True, liger_kernel_config=config)


def test_ligers_patches_replace_experts_so_they_are_not_for_a_model_with_some() -> None:
    """Its loss is."""
    for trainer in ("axolotl", "transformers"):
        for base, is_explored in ((LIBRARY, False), (DENSE, True)):
            place = build(base, trainer, device_kind="cuda").space.place
            assert (Kernels.LIGER in KERNELS.considered(place)) is is_explored
            assert "liger" in LOSS.considered(place)
        assert "liger beside experts" in str(refused_request(LIBRARY, trainer, kernels=["liger"]))
    assert Kernels.LIGER in KERNELS.considered(build(LIBRARY, "bexp").space.place)
    with pytest.raises(ExportError, match="Axolotl cannot express the kernels of liger beside experts"):
        export("axolotl", exploration(candidate(kernels="liger", loss="library")))
