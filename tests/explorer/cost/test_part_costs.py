"""A model described by its parts: its components, what they are expected to cost, and how they add up to a step."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.components import Component, ComponentBytes, ComponentKind, Work
from bexp.explorer.cost.decomposition import Decomposer
from bexp.explorer.cost.part_costs import COMPILED_SHARE, again_work, part_work, predict_part_bytes
from bexp.explorer.cost.roofline import roofline_seconds
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.execution import Execution
from bexp.explorer.dimensions.kernels import Kernels
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.search.legal_space import enumerate_candidates
from tests.explorer.cost.described import part, parts, request
from tests.explorer.cost.tiny import request_of_parts
from tests.explorer.simulator import report


def layer(**changes: Any) -> Component:
    settings = {"kind": "layer", "part": "dense", "micro_batch_size": 4, "backend": "sdpa"}
    return Component.model_validate({**settings, **changes})


def test_a_step_beside_master_weights_holds_all_gradients_in_float32() -> None:
    component = Component(kind=ComponentKind.OPTIMIZER, micro_batch_size=0)
    master = request_of_parts(training={"precision": "master"})
    assert predict_component_bytes(component, parts(), master).backward_peak == 2 * parts().trainable_bytes
    assert predict_component_bytes(component, parts(), request_of_parts()).backward_peak == 0


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 1.0),
        ({"recompute": "selective"}, 0.9),
        ({"recompute": "activations"}, 0.6),
        ({"recompute": "projections"}, 0.3),
        ({"recompute": "full"}, 1.0),
        ({"bta_tile": 2}, 0.5),
    ],
)
def test_a_layer_keeps_the_share_that_its_policy_leaves(changes: dict[str, Any], share: float) -> None:
    tokens, live = 4 * 32, 4 * 32 * 640
    found = predict_component_bytes(layer(**changes), parts(), request())
    assert found == ComponentBytes(round(share * live), live, live + tokens * 128)


def test_a_layer_on_the_host_keeps_its_output_and_moves_the_rest_there_and_back() -> None:
    on_host = layer(recompute="offload")
    found = predict_component_bytes(on_host, parts(), request())
    assert (found.saved, found.forward_peak, found.backward_peak) == (4 * 32 * 128, 4 * 32 * 128, 2 * 4 * 32 * 128)
    again = again_work(on_host, parts(), part_work(on_host, parts()))
    assert again == Work(0.0, 2 * 4 * 32 * 640)


def test_ligers_loss_reads_the_heads_weights_for_each_chunk() -> None:
    """Seconds of a sequence for heads of 102,400 and 151,936 words of 2,048, as an H100 took them."""
    rates = {"matmul_flops_per_second": {"bfloat16": 7.8e14}, "memory_bandwidth_bytes_per_second": 3.0e12}
    hardware = report().hardware.model_copy(update=rates)
    for words, measured in ((102_400, {2: 15.6, 8: 9.52, 16: 8.89}), (151_936, {4: 21.19, 8: 14.96, 16: 13.37})):
        shell = part(2 * 2048 * words, flops_per_token=2.0 * 2048 * words, saved_bytes_per_token=2.0 * words + 4 * 4096)
        model = parts(dtype="bfloat16", seq_length=4096, output_bytes_per_token=4096, shell=shell)
        distances = []
        for m, milliseconds in measured.items():
            component = Component(kind=ComponentKind.SHELL, micro_batch_size=m, backend="liger")
            predicted = roofline_seconds(component, model, request(), hardware)
            distances.append(m * milliseconds / predicted.device)
        assert max(distances) < 1.4 * min(distances), "1.7 times, if the weights were read once"


def test_kinds_are_named_once_and_layers_name_them() -> None:
    twice = parts().kinds[:1] * 2
    with pytest.raises(ValueError, match="same name"):
        parts(kinds=twice, layers=("dense",))
    with pytest.raises(ValueError, match="unknown kinds: nothing"):
        parts(layers=("dense", "nothing"))


def test_compiled_layers_are_components_of_their_own_and_share_the_rest() -> None:
    decompose = Decomposer(parts(), training=True)
    eager, compiled = (
        decompose(Candidate(micro_batch_size=4, attention_backend="sdpa", num_query_groups=1, execution=execution))
        for execution in (Execution.EAGER, Execution.COMPILE)
    )
    assert (eager.head, eager.optimizer) == (compiled.head, compiled.optimizer)
    (plain,), (other,) = eager.layers[0].blocks, compiled.layers[0].blocks
    assert (str(plain.backend), str(other.backend)) == ("sdpa", "sdpa+compiled")
    saved = [predict_part_bytes(component, parts(), request()).saved for component in (plain, other)]
    assert saved[1] == pytest.approx(COMPILED_SHARE * saved[0])


def test_graphs_replay_the_components_that_they_were_captured_from() -> None:
    decompose = Decomposer(parts(), training=True)
    eager, compiled, graph, both = (
        decompose(Candidate(micro_batch_size=4, attention_backend="sdpa", num_query_groups=1, execution=execution))
        for execution in Execution
    )
    assert (graph, both) == (eager, compiled)


def test_layers_with_other_kernels_are_components_of_their_own_and_are_not_compiled() -> None:
    own = {"target": "transformers", "model": None, "hf_config": {"model_type": "llama"}, "hf_seq_length": 32}
    asked = request(**own, micro_batch_size=2, recompute=["none"], execution="explore", kernels=["library", "liger"])
    both = tuple(BackendSupport(name=name, usable=True) for name in Kernels)
    found = enumerate_candidates(asked, report().model_copy(update={"choices": {"kernels": both}}), parts()).candidates
    decompose = Decomposer(parts(), training=True)
    first = found[0].attention_backend
    backends = {str(decompose(each).layers[0].blocks[0].backend) for each in found if each.attention_backend == first}
    assert backends == {first, f"{first}+liger", f"{first}+compiled"}
    assert len({decompose(candidate).head for candidate in found}) == 1
