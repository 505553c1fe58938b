"""What each format says of many answers, as recorded: people paste it into their trainers.

Of every answer but the plain one, the lines are recorded that differ from the plain one's. `tests/frameworks` has the
same answers read by the trainers themselves.
"""

from __future__ import annotations

from difflib import ndiff
from pathlib import Path
from typing import Any

import pytest

from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.exports.exploration import ExportSource
from bexp.explorer.exports.export import export
from bexp.explorer.model.quantization import WeightBytes
from bexp.explorer.trainers.document import ExportError
from bexp.explorer.trainers.registry import FORMATS
from tests.explorer.exports.samples import (
    CONFIG,
    LENGTHS,
    SHAPES,
    SHARDED,
    candidate,
    exploration,
    own_exploration,
    with_parts,
)
from tests.explorer.exports.test_meshes import shadowed
from tests.frameworks.answers import ANSWERS
from tests.recordings import check_recorded

TEXTS = Path(__file__).parent / "texts"


def of_texts(batching: str, size: int = 8, attention: str = "flash_attention_2", **asked: Any) -> ExportSource:
    return exploration(candidate(size, attention_backend=attention), lengths=LENGTHS, batching=batching, **asked)


def adapters(**changes: Any) -> dict[str, Any]:
    return {"training": {"lora": LORA | changes}}


def quantized(best: Candidate | None = None, experts: int | None = None) -> ExportSource:
    """An answer for weights in 4 bits; of its experts so many bytes are quantised."""
    source = exploration(best, quantization="bnb_4bit", training={"lora": LORA})
    weights = [] if experts is None else [WeightBytes(kind="experts", num_bytes=1 << 30, quantized_bytes=experts)]
    return with_parts(source, weights=tuple(weights))


FLASH = candidate(attention_backend="flash_attention_2")
LORA: dict[str, Any] = {"r": 8, "target_modules": ["q_proj", "v_proj"], "alpha": 32}
OWN_QUANTIZED = {**CONFIG, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
MORE: dict[str, ExportSource] = {
    "padded": of_texts("padded"),
    "grouped": of_texts("grouped"),
    "packed": of_texts("packed"),
    "packed in single rows": of_texts("packed", 1),
    "packed with a mask": of_texts("packed", attention="sdpa"),
    "packed in one row for TRL": of_texts("packed", attention="sdpa", trainer="trl"),
    "eight devices": exploration(num_devices=8),
    "sharded without accumulation": exploration(num_devices=8, batch_size=64, training={"sharding": "zero3"}),
    "sharded optimizer without a choice": exploration(
        num_devices=8, training={"sharding": "zero2"}, trainer="deepspeed"
    ),
    "gradients in float32": exploration(num_devices=8, training={"optimizer": {"grad_dtype": "float32"}}),
    "layers": exploration(candidate(recompute=Recompute("layers_3"))),
    "most layers": exploration(candidate(recompute=Recompute("layers_9"))),
    "groups": exploration(candidate(recompute=Recompute("groups_4"))),
    "explored for Axolotl": exploration(trainer="axolotl"),
    "Axolotl's other attention": exploration(FLASH, trainer="axolotl"),
    "experts that stay plain": quantized(experts=0),
    "experts that are quantised": quantized(experts=1 << 30),
    "quantised beside flash attention": quantized(FLASH),
    "flash attention": exploration(FLASH),
    "a quantised checkpoint": exploration(hf_config=OWN_QUANTIZED, training={"lora": LORA}),
    "every choice of adapters": exploration(
        **adapters(target_parameters=["experts.gate_up_proj"], modules_to_save=["embed_tokens"], use_rslora=True)
    ),
    "linear modules": with_parts(exploration(**adapters(target_modules="linear-modules")), adapted={"q_proj": 8}),
    "all linear": exploration(**adapters(target_modules="all-linear")),
    "a variant": exploration(
        candidate(num_query_groups=2), num_query_groups=[2, 8], hf_config=None, hf_seq_length=None, model=SHAPES
    ),
    "a person's own code": own_exploration(64, "gradient_checkpointing=false"),
    "a person's own code without sequences": own_exploration(1),
    "kernel, policy, compiler and allocator": exploration(
        candidate(attention_backend="sdpa:cudnn", recompute=Recompute.PARTIAL_25, execution="compile"),
        execution=["eager", "compile"],
        allocator="expandable_segments",
        **SHARDED,
    ),
    "a mode of our kernels": shadowed(),
    "a plain mode that may not fit": shadowed(fits=False),
    "provisional": exploration(final=False),
    "evaluation": exploration(mode="eval"),
}


def changed(plain: list[str], name: str, answer: ExportSource) -> list[str]:
    try:
        return [line for line in ndiff(plain, lines_of(name, answer)) if line.startswith(("+ ", "- "))]
    except ExportError as error:
        return [str(error)]


def lines_of(name: str, answer: ExportSource) -> list[str]:
    made = export(name, answer)
    return made.text.splitlines() if made.has_header else [*made.header, *made.text.splitlines()]


@pytest.mark.parametrize("name", FORMATS)
def test_exports_are_as_recorded(name: str) -> None:
    plain = lines_of(name, ANSWERS["plain"])
    rows: list[Any] = [["plain", plain]]
    for title, answer in (ANSWERS | MORE).items():
        if title != "plain":
            rows.append([title, changed(plain, name, answer)])
    check_recorded(TEXTS / f"{name}.json", rows)
