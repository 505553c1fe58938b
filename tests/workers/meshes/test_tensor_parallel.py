from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bexp.explorer.cost.components import Component
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.meshes.layers import MeshCandidate, MeshDecomposer
from bexp.explorer.meshes.memory import HeldParameters
from bexp.explorer.meshes.mesh import Mesh
from bexp.explorer.meshes.shards import shard_of, spread_expert_model
from bexp.explorer.meshes.transfers import Transfers
from bexp.explorer.model.model import DType, LayerKind, ModelSpec, MoESpec
from bexp.explorer.model.training import LossSpec
from bexp.explorer.request.request import ExplorationRequest
from bexp.kernels.expert_parallel.peers import GroupPeers
from bexp.measure.memory_meters import byte_meter, measure_memory
from bexp.workers.meshes.spread_experts import build_busiest_rank, build_spread_experts
from bexp.workers.meshes.tensor_parallel import TensorParallel, spread_loss_alone, whole_parameters
from bexp.workers.meshes.training_run import DecoderStage
from bexp.workers.targets.reference.factory import build_block, example_inputs
from bexp.workers.targets.reference.ffn_block import MoEFFN
from bexp.workers.targets.reference.head import Head
from bexp.workers.targets.reference.target import BlockPasses

CPU = torch.device("cpu")
MODEL = ModelSpec(
    name="tiny",
    num_layers=3,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    vocab_size=64,
    seq_length=32,
    norm="layernorm",  # on a CPU, RMSNorm keeps its tokens in float32 too
    dtype=DType.BFLOAT16,
)
CANDIDATE = Candidate(micro_batch_size=2, attention_backend="flash", num_query_groups=4)
REQUEST = ExplorationRequest.model_validate(
    {
        "model": MODEL,
        "num_devices": 2,
        "device_kind": "cpu",
        "batch_size": 4,
        "micro_batch_size": 2,
        "parallelism": {"tensor": 2},
    }
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[TensorParallel]:
    """The first of two ranks; what the other would send is not there."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    yield TensorParallel(dist.group.WORLD, MODEL)
    dist.destroy_process_group()


def saved_by_layers(ranks: TensorParallel, number: int) -> int:
    """The bytes that so many layers of a rank save, their last output included."""
    stage = DecoderStage(MODEL, CANDIDATE, REQUEST, CPU, 0, number, ranks=ranks)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    with byte_meter(CPU, (*stage.parameters(), *stage.buffers(), x)) as meter:
        before = meter.level()
        out = x
        for layer in stage.layers:
            out = layer(out)
        saved = meter.level() - before
        del out
    return saved


def test_a_layer_of_a_rank_saves_what_its_blocks_compose_to(ranks: TensorParallel) -> None:
    blocks = MeshDecomposer(MODEL, REQUEST, Transfers({}, "cpu"))(MeshCandidate(Mesh(tensor=2), CANDIDATE))
    composed = 0.0
    for block in blocks.blocks[(LayerKind.DENSE, False)]:
        shard = MODEL.model_copy(update={"num_attention_heads": 2, "head_dim": 16, "ffn_hidden_size": 64})
        module = build_block(shard, block.component, REQUEST, CPU)
        inputs = example_inputs(shard, block.component, CPU, training=True)
        passes = BlockPasses(module, inputs, training=True, gradient_dtype=torch.bfloat16)
        hidden = 2 * 32 * 64 * 2
        composed += measure_memory(passes, CPU).saved - block.sharded_outputs * hidden / 2
    assert saved_by_layers(ranks, 2) - saved_by_layers(ranks, 1) == pytest.approx(composed, rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "rmsnorm", "qk_norm": "head", "position": "learned"},
        {"qk_norm": "full", "mlp_bias": True, "attention_output_bias": True, "qkv_bias": True, "lm_head_bias": True},
        {"moe": {"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 32}},
        {"moe": {"shared_expert_ffn_hidden_size": 64, "shared_expert_gate": True}, "mlp_bias": True},
        {"moe": {"shared_expert_ffn_hidden_size": 64, "shared_expert_gate": True}, "expert": 2},
    ],
    ids=str,
)
def test_as_many_gradients_are_summed_over_ranks_as_the_cost_model_counts(
    ranks: TensorParallel, changes: dict[str, Any]
) -> None:
    changes = dict(changes)
    mesh = Mesh(tensor=2, expert=changes.pop("expert", 1))
    if "moe" in changes:
        changes["moe"] = MoESpec(**{"num_experts": 4, "top_k": 2, "expert_ffn_hidden_size": 32} | changes["moe"])
    model = ModelSpec.model_validate(MODEL.model_dump() | changes)
    request = ExplorationRequest.model_validate(REQUEST.model_dump() | {"model": model})
    candidate = CANDIDATE.model_copy(update={"expert_backend": "loop"}) if model.moe is not None else CANDIDATE
    whole = TensorParallel(ranks.group, model)

    def experts(component: Component) -> MoEFFN:
        sized = component.model_copy(update=mesh.expert_sizes)
        return build_spread_experts(GroupPeers(ranks.group), spread_expert_model(model, 2), sized, request, CPU, None)

    spread = experts if mesh.expert > 1 else None
    stage = DecoderStage(model, candidate, request, CPU, 0, 3, ranks=whole, experts=spread)
    decompose = MeshDecomposer(model, request, Transfers({}, "cpu"))
    blocks = decompose(MeshCandidate(mesh, candidate))
    held = HeldParameters.of_stage(Counter(blocks.layers), blocks, mesh, 0, decompose.shard(2))
    assert held.repeated == sum(each.numel() for each in whole_parameters(stage))


def test_experts_with_shared_ones_save_what_both_blocks_compose_to() -> None:
    moe = MoESpec(num_experts=4, top_k=2, expert_ffn_hidden_size=32, shared_expert_ffn_hidden_size=64)
    model = MODEL.model_copy(update={"moe": moe})
    request = ExplorationRequest.model_validate(REQUEST.model_dump() | {"model": model, "parallelism": {"expert": 2}})
    candidate = CANDIDATE.model_copy(update={"expert_backend": "loop"})
    blocks = MeshDecomposer(model, request, Transfers({}, "cpu"))(MeshCandidate(Mesh(expert=2, data=2), candidate))
    _, experts, shared = blocks.blocks[(LayerKind.MOE, False)]
    composed, hidden = 0.0, 2 * 32 * 64 * 2

    def saved(module: torch.nn.Module, component: Component) -> int:
        inputs = example_inputs(model, component, CPU, training=True)
        passes = BlockPasses(module, inputs, training=True, gradient_dtype=torch.bfloat16)
        return measure_memory(passes, CPU).saved

    for block in (experts, shared):
        shard, asked = shard_of(block.component, model, request)
        composed += saved(build_block(shard, block.component, asked, CPU), block.component)
        composed -= block.repeated_outputs * hidden
    whole, _ = build_busiest_rank(model, experts.component, request, CPU, None)
    assert whole.shared is not None
    assert saved(whole, experts.component) == pytest.approx(composed, rel=0.01)


def test_the_loss_of_a_part_of_the_vocabulary_needs_one_float32_copy_of_a_chunk() -> None:
    num_tokens, vocabulary = 64, 4096
    model = MODEL.model_copy(update={"vocab_size": vocabulary})
    head = Head(model, loss=LossSpec(kind="chunked", chunk_tokens=128), device=CPU, training=True)
    spread_loss_alone(head)
    x = torch.randn(2, num_tokens // 2, 64, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocabulary, (2, num_tokens // 2))
    with byte_meter(CPU, (*head.parameters(), x, targets)) as meter:
        before = meter.level()
        loss = head(x, targets)
        peak = meter.peak() - before
    loss.backward()
    assert x.grad is not None
    assert head.w_vocab.grad is not None
    found = x.grad.double(), head.w_vocab.grad.double(), loss.item()
    x.grad, head.w_vocab.grad = None, None
    logits = head.norm(x).double() @ head.w_vocab.double().t()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.backward()
    assert found[2] == pytest.approx(expected.item(), rel=1e-3)
    for mine, theirs in zip(found[:2], (x.grad, head.w_vocab.grad), strict=True):
        assert theirs is not None
        assert (mine - theirs).norm() < 0.02 * theirs.double().norm()
    logits_bytes = num_tokens * vocabulary * (2 + 4)
    assert peak < logits_bytes + 2 * vocabulary * 64 + num_tokens * vocabulary * 2, "no second float32 copy"
