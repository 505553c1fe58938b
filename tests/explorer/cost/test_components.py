"""How a candidate's step is split into components, and which candidates share one."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from pydantic import ValidationError

from bexp.explorer.cost.components import BackEnd, Component
from bexp.explorer.cost.decomposition import Decomposer, Decomposition
from bexp.explorer.dimensions.attention import ATTENTION_OF
from bexp.explorer.dimensions.candidate import CHOICES, Candidate
from bexp.explorer.dimensions.dimension import CodePart
from bexp.explorer.dimensions.experts import EXPERTS_OF
from bexp.explorer.model.expert_kernels import EXPERT_KERNELS
from bexp.explorer.model.target import TRANSFORMERS
from tests.explorer.cost.tiny import model_of, request


def component(kind: str = "attention", **changes: Any) -> Component:
    return Component.model_validate({"kind": kind, "micro_batch_size": 4, **changes})


def candidate(**changes: Any) -> Candidate:
    shape = {"micro_batch_size": 6, "attention_backend": "flash", "num_query_groups": 1}
    return Candidate.model_validate({**shape, **changes})


def split(
    chosen: Candidate, model: dict[str, Any] | None = None, *, training: bool = True, communicates: bool = False
) -> Decomposition:
    req = request(model, routing={"kind": "uniform"})
    return Decomposer(model_of(req), training=training, communicates=communicates)(chosen)


SHARED: dict[str, Any] = {"context_parallel_size": 4, "context_parallel_layout": "ring"}


def test_marks_of_a_layer_are_no_names_of_its_kernels_and_belong_to_one_choice() -> None:
    """They share one text with both."""
    of_layers = [choice for choice in CHOICES if choice.part is CodePart.LAYER]
    each = [{choice.mark(value) for value in choice.values} - {None} for choice in of_layers]
    marks = set[str | None]().union(*each)
    assert len(marks) == sum(map(len, each)) > 1
    assert not marks & {*chain(*ATTENTION_OF.values()), *EXPERTS_OF[TRANSFORMERS]}


def test_joint_components_are_those_that_need_several_processes() -> None:
    assert component(**SHARED).is_joint
    assert component("communication", micro_batch_size=0).is_joint
    alone = component("dense_ffn", context_parallel_size=4)
    assert not alone.is_joint
    assert not alone.communicates
    assert alone.sequences == 1.0
    assert component("head", micro_batch_size=3, context_parallel_size=2).sequences == 1.5


def test_half_of_each_of_two_sequences_is_the_work_of_a_whole_one() -> None:
    found = split(candidate(micro_batch_size=6, **SHARED))
    shapes = {c.kind.value: (c.micro_batch_size, c.context_parallel_size) for c in found.components}
    expected = {"embedding": (3, 2), "dense_ffn": (3, 2), "head": (3, 2), "attention": (6, 4), "optimizer": (0, 1)}
    assert shapes == expected
    alone = split(candidate(micro_batch_size=8, **SHARED))
    assert alone.head == split(candidate(micro_batch_size=2)).head


def test_equal_components_of_two_candidates_are_one() -> None:
    decompose = Decomposer(model_of(request()), training=True)
    first, second = decompose(candidate()), decompose(candidate(attention_backend="math"))
    assert first.head is second.head
    assert first.layers[0].blocks[1] is second.layers[0].blocks[1]
    assert first.layers[0].blocks[0] != second.layers[0].blocks[0]


@pytest.mark.parametrize(
    ("kind", "text", "back_end"),
    [
        ("attention", "flash", BackEnd(attention="flash")),
        *(("moe_ffn", kernel.name, BackEnd(experts=kernel.name)) for kernel in EXPERT_KERNELS),
        ("moe_ffn", "quack+compiled", BackEnd(experts="quack", marks=("compiled",))),
        ("dense_ffn", "compiled", BackEnd(marks=("compiled",))),
        ("shell", "compile=true", BackEnd(setting="compile=true")),
        ("layer", "sdpa", BackEnd("sdpa")),
        ("layer", "sdpa+grouped_mm+liger+compiled", BackEnd("sdpa", "grouped_mm", ("liger", "compiled"))),
        ("layer", "sdpa+compiled", BackEnd("sdpa", marks=("compiled",))),
        ("head", None, None),
    ],
)
def test_a_recorded_back_end_is_read_and_written(kind: str, text: str | None, back_end: BackEnd | None) -> None:
    document = {"kind": kind, "micro_batch_size": 1, "backend": text}
    component = Component.model_validate(document)
    assert component.backend == back_end
    assert component.model_dump(mode="json")["backend"] == text
    assert Component.model_validate_json(component.model_dump_json()) == component


def test_a_back_end_is_text() -> None:
    with pytest.raises(ValidationError, match="must be text"):
        Component.model_validate({"kind": "layer", "micro_batch_size": 1, "backend": 5})
