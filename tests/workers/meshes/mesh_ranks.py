"""Ranks that run whole models on meshes: four on the CPU, or two on GPUs.

    python -m tests.workers.meshes.mesh_ranks FOLDER [cuda]

writes there how far each rank's loss and gradients are from those of one device with the same weights and data.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from bexp.explorer.cost.components import Component, ComponentKind, ExchangeSpec, Operation
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.parallelism import Schedule
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.meshes.mesh import Mesh, MeshRun
from bexp.explorer.meshes.shards import SPREAD_EXPERTS
from bexp.explorer.model.model import DType, ModelSpec, MoESpec
from bexp.explorer.model.training import LossSpec, Sharding, TrainingSpec
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.measure.passes import Passes
from bexp.measure.timing import HostTimer
from bexp.workers.instruments.device_instruments import Instruments
from bexp.workers.instruments.phases import PhaseClock
from bexp.workers.meshes.extension import measure_exchange
from bexp.workers.meshes.training_run import MeshTrainingRun
from bexp.workers.profiler.distributed.process_groups import ProcessGroups
from bexp.workers.profiler.trials.component import measure_component
from bexp.workers.targets.reference.decoder import DecoderModel
from bexp.workers.targets.reference.factory import random_tokens
from bexp.workers.targets.reference.target import ReferenceTarget
from bexp.workers.training.optimizer import own
from tests.forked_ranks import SHARDING, fork_ranks
from tests.waits import PATIENCE_SECONDS

NUM_RANKS = {"cpu": 4, "cuda": 2}
IMPORTED_LATE = (*SHARDING, "torch.distributed.pipelining")
"""What the first mesh, sharding and pipeline import."""
MICRO_BATCH_SIZE = 3  # two ranks then share a sequence
DENSE = ModelSpec(
    name="tiny",
    num_layers=3,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    qk_norm="head",
    vocab_size=37,
    seq_length=8,
    dtype=DType.FLOAT32,
)
MOE = MoESpec(
    num_experts=4,
    top_k=2,
    expert_ffn_hidden_size=8,
    first_k_dense=1,
    shared_expert_ffn_hidden_size=8,
    shared_expert_gate=True,
)
EXPERTS = DENSE.model_copy(update={"qk_norm": "full", "moe": MOE})
DROPPING = EXPERTS.model_copy(update={"moe": MOE.model_copy(update={"capacity_factor": 0.75})})
TIED = DENSE.model_copy(
    update={
        "tie_embeddings": True,
        "position": "learned",
        "max_position_embeddings": 8,
        "norm": "layernorm",
        "activation": "gelu",
        "gated_mlp": False,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "qk_norm": "none",
    }
)
BIASED_EXPERTS = EXPERTS.model_copy(update={"mlp_bias": True, "attention_output_bias": True})
DEEP = DENSE.model_copy(update={"num_layers": 5})
DEEP_TIED = TIED.model_copy(update={"num_layers": 5})
ONE = {"pipeline": 2, "schedule": Schedule.ONE_F_ONE_B}
TWO = {"pipeline": 2, "virtual_stages": 2, "schedule": Schedule.INTERLEAVED}
CASES: dict[str, tuple[Mesh, tuple[int, ...], ModelSpec, Recompute]] = {
    "tensor": (Mesh(tensor=2), (3,), DENSE, Recompute.NONE),
    "tensor of experts, recomputed": (Mesh(tensor=2), (3,), EXPERTS, Recompute.FULL),
    "tensor of experts with biases, activations recomputed": (
        Mesh(tensor=2),
        (3,),
        BIASED_EXPERTS,
        Recompute.ACTIVATIONS,
    ),
    "tensor, tied": (Mesh(tensor=2), (3,), TIED, Recompute.SELECTIVE),
    "1f1b": (Mesh(**ONE), (2, 1), EXPERTS, Recompute.NONE),
    "1f1b, tied": (Mesh(**ONE), (1, 2), TIED, Recompute.FULL),
    "interleaved": (Mesh(**TWO), (1, 2, 1, 1), DEEP, Recompute.NONE),
    "tensor with zero1": (Mesh(tensor=2, data=2, sharding=Sharding.ZERO1), (3,), TIED, Recompute.NONE),
    "tensor with zero3": (Mesh(tensor=2, data=2, sharding=Sharding.ZERO3), (3,), EXPERTS, Recompute.NONE),
    "tensor with replicas": (Mesh(tensor=2, data=2), (3,), DENSE, Recompute.NONE),
    "1f1b with replicas": (Mesh(**ONE, data=2), (2, 1), DENSE, Recompute.NONE),
    "1f1b with zero1": (Mesh(**ONE, data=2, sharding=Sharding.ZERO1), (2, 1), TIED, Recompute.NONE),
    "experts": (Mesh(expert=2, data=2), (3,), EXPERTS, Recompute.NONE),
    "experts in chunks": (Mesh(expert=2, data=2, overlap_degree=2), (3,), EXPERTS, Recompute.FULL),
    "experts, one shadowed": (Mesh(expert=2, data=2, shadowed_experts=1), (3,), EXPERTS, Recompute.NONE),
    "experts with a capacity, in chunks, one shadowed": (
        Mesh(expert=2, data=2, overlap_degree=2, shadowed_experts=1),
        (3,),
        DROPPING,
        Recompute.FULL,
    ),
    "tensor of experts with a capacity": (Mesh(tensor=2), (3,), DROPPING, Recompute.NONE),
    "experts with zero3": (Mesh(expert=2, data=2, sharding=Sharding.ZERO3), (3,), EXPERTS, Recompute.NONE),
    "experts with replicas": (Mesh(expert=2, data=4), (3,), EXPERTS, Recompute.NONE),
    "tensor with experts": (Mesh(tensor=2, expert=2), (3,), BIASED_EXPERTS, Recompute.NONE),
    "tensor with experts, one shadowed": (
        Mesh(tensor=2, expert=2, data=2, shadowed_experts=1),
        (3,),
        EXPERTS,
        Recompute.FULL,
    ),
    "tensor with experts on all ranks": (
        Mesh(tensor=2, expert=4, data=2, sharding=Sharding.ZERO3),
        (3,),
        EXPERTS,
        Recompute.NONE,
    ),
    "tensor of four with two parts of the experts": (
        Mesh(tensor=4, expert=2),
        (3,),
        EXPERTS.model_copy(update={"num_query_groups": 4}),
        Recompute.NONE,
    ),
    "experts in a pipeline": (Mesh(**ONE, expert=2, data=2), (2, 1), EXPERTS, Recompute.NONE),
    "interleaved with tensor": (Mesh(**TWO, tensor=2), (1, 2, 1, 1), DEEP_TIED, Recompute.NONE),
}


def num_micro_batches(mesh: Mesh) -> int:
    """Those of a step: enough for a pipeline to be full, else two, so that gradients are added up."""
    return 4 if mesh.pipeline > 1 else 2


def shard(name: str, whole: Tensor, mesh: Mesh, rank: int, model: ModelSpec) -> Tensor:
    """What a tensor-parallel rank has of a parameter."""
    size, tail = mesh.tensor, name.rsplit(".", 1)[-1]
    if mesh.expert > 1 and whole.dim() == 3:
        return whole.chunk(mesh.expert)[rank]
    if size == 1:
        return whole
    if tail in {"w_qkv", "b_qkv"}:
        heads, groups = model.num_attention_heads, model.query_groups
        parts = whole.split([n * model.head_size for n in (heads, groups, groups)])
        return torch.cat([part.chunk(size)[rank] for part in parts])
    if tail in {"w_in", "b_in"}:
        dim = 2 if whole.dim() == 3 else 0
        halves = whole.chunk(2, dim) if model.gated_mlp else [whole]
        return torch.cat([half.chunk(size, dim)[rank] for half in halves], dim)
    if tail == "w_out":
        return whole.chunk(size, 1)[rank]
    if model.qk_norm == "full" and name.endswith(("q_norm.weight", "k_norm.weight")):
        return whole.chunk(size)[rank]
    if tail in {"w_tokens", "w_vocab", "b_vocab"}:
        rows = -(-len(whole) // size)
        padded = torch.cat((whole, whole.new_zeros((rows * size - len(whole), *whole.shape[1:]))))
        return padded[rank * rows : (rank + 1) * rows]
    return whole


def name_in_model(name: str, first: int) -> str:
    """The name of a stage's parameter in the whole model."""
    head, _, rest = name.partition(".")
    if head == "layers":
        number, _, rest = rest.partition(".")
        rest = f"{int(number) + first}.{rest}"
        place = "mlp.b_out" if ".ffn." in rest else "b_out"
        rest = rest.replace("reduce.bias", place).replace("shared.bias", "shared.b_out").replace("shared.mlp", "shared")
    return f"{head}.{rest}".replace("norm.norm", "norm")


def differ(
    run: MeshTrainingRun, cuts: list[int], device: DecoderModel, case: Mesh, rank: int, where: torch.device
) -> tuple[float, float]:
    """Copy the model's weights into the stages, compute gradients, and compare them and the loss."""
    model, number = CURRENT["model"], num_micro_batches(case)
    tensor, replica = rank % case.tensor, rank // case.tensor % case.data
    found = dict(device.named_parameters())
    pairs = []
    for i, stage in enumerate(run.stages):
        first = cuts[run.rank + i * case.pipeline]
        for name, parameter in stage.named_parameters():
            other = name_in_model(name, first)
            if other not in found:  # the last stage's copy of a tied matrix
                assert other == "head.w_vocab"
                other = "embedding.w_tokens"
            pairs.append((parameter, other))

    def share(parameter: Tensor, name: str, whole: Tensor) -> Tensor:
        experts = case.expert > 1 and whole.dim() == 3
        part = shard(name, whole, case, rank % case.expert if experts else tensor, model)
        if own(parameter).shape == part.shape:
            return part
        rows = -(-len(part) // case.data)  # fully_shard cuts the rows
        return part[replica * rows : (replica + 1) * rows]

    with torch.no_grad():
        for parameter, name in pairs:
            own(parameter).copy_(share(parameter, name, found[name]))
    losses = []
    for other_replica in range(case.data):
        generator = torch.Generator(where).manual_seed(1 + other_replica)
        shape = (number * MICRO_BATCH_SIZE, model.seq_length)
        tokens, targets = (random_tokens(model, shape, where, generator) for _ in range(2))
        for part, wanted in zip(tokens.chunk(number), targets.chunk(number), strict=True):
            loss = device(part, wanted)
            (loss / (number * case.data)).backward()
            losses.append(loss.item())
    run.compute_gradients()
    gradients = {p: g for p, g in zip(run.optimizer.parameters, run.optimizer.gradients, strict=True) if g is not None}
    worst = 0.0
    for parameter, name in pairs:
        expected = found[name].grad
        assert expected is not None
        part = share(parameter, name, expected)
        assert part.numel() == gradients[parameter].numel()
        worst = max(worst, float((gradients[parameter] - part).norm() / (expected.norm() + 1e-8)))
    own_losses = losses[replica * number :][:number]
    apart = max((abs(a.item() - b) for a, b in zip(run.losses, own_losses, strict=False)), default=0.0)
    if run.losses:
        assert len(run.losses) == number
    return apart, worst


class InARow(HostTimer):
    """Runs exchanges in a row as well, as a timer of a GPU does."""

    def warm_up(self, passes: Passes) -> None:
        passes.run_chain(8)
        super().warm_up(passes)


def measure_exchanges(groups: ProcessGroups, instruments: Instruments) -> float:
    """Measure each operation of neighbours and of ranks two apart; returns the least seconds."""
    components = tuple(
        Component(
            kind=ComponentKind.EXCHANGE,
            micro_batch_size=0,
            exchange=ExchangeSpec(operation=operation, size=2, stride=stride, num_bytes=4096),
        )
        for operation in Operation
        for stride in (1, 2)
    )
    plan = components_plan(components, groups.size, DENSE)
    groups.prepare(plan)
    instruments.timer = InARow()
    instruments.join(groups.rank_group(plan))
    return min(measure_exchange(instruments, each, 0, PhaseClock()).device_seconds for each in components)


def measure_shared_experts(groups: ProcessGroups, instruments: Instruments) -> float:
    """Measure experts that two ranks share, which exchange tokens in it; returns the seconds together."""
    component = Component(
        kind=ComponentKind.MOE_FFN,
        part=SPREAD_EXPERTS,
        micro_batch_size=1,
        backend="loop",
        expert_parallel_size=2,
        overlap_degree=2,
        shadowed_experts=1,
    )
    plan = components_plan((component,), groups.size, DROPPING)
    groups.prepare(plan)
    instruments.timer = HostTimer()
    instruments.join(groups.rank_group(plan))
    request = ExplorationRequest(model=DROPPING)
    target = ReferenceTarget(request, instruments)
    with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        found = measure_component(instruments, target, DROPPING, component, request, PhaseClock())
    assert exchange.call_count > found.repeats, "ranks exchange tokens"
    assert found.together_forward_seconds is not None
    assert found.together_backward_seconds is not None
    return min(found.together_forward_seconds, found.together_backward_seconds)


def components_plan(components: tuple[Component, ...], number: int, model: ModelSpec) -> TrialTask:
    return TrialTask(
        number=0,
        kind=TrialKind.COMPONENTS,
        model=model,
        candidate=Candidate(micro_batch_size=1, attention_backend="math", num_query_groups=2),
        components=components,
        timeout_seconds=PATIENCE_SECONDS,
        num_processes=number,
    )


def cases_of(number: int) -> list[str]:
    """The cases that so many ranks can run: all of four, and those of two devices of two."""
    return [name for name, (mesh, *_) in CASES.items() if mesh.num_devices <= number]


CURRENT: dict[str, ModelSpec] = {}


def run_rank(rank: int, folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    number = NUM_RANKS[kind]
    where = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(where)
    instruments = Instruments(where, number)
    store = FileStore(str(folder / "store"), number)
    groups = ProcessGroups(store, rank, number, where)
    said: dict[str, tuple[float, float]] = {}
    training = TrainingSpec(loss=LossSpec(kind="chunked", chunk_tokens=128))
    for name in cases_of(number):
        mesh, layers, model, policy = CASES[name]
        CURRENT["model"] = model
        candidate = Candidate(
            micro_batch_size=MICRO_BATCH_SIZE,
            recompute=policy,
            attention_backend="math",
            expert_backend="loop" if model.moe is not None else None,
            num_query_groups=model.query_groups,
        )
        run = MeshRun(mesh=mesh, layers_per_stage=layers, num_micro_batches=num_micro_batches(mesh))
        task = TrialTask(
            number=0,
            kind=TrialKind.WHOLE_MODEL,
            model=model,
            candidate=candidate,
            timeout_seconds=PATIENCE_SECONDS,
            num_processes=mesh.num_devices,
            shared_run=run,
        )
        groups.prepare(task)
        if not groups.takes_part(task):
            continue
        instruments.join(groups.rank_group(task))
        request = ExplorationRequest(model=model, training=training)
        training_run = MeshTrainingRun(instruments, model, candidate, run, request)
        cuts = [sum(layers[:i]) for i in range(len(layers))]
        generator = torch.Generator(where).manual_seed(7)
        device = DecoderModel(model, candidate, request, where, generator=generator)
        with torch.no_grad():
            for parameter in device.parameters():  # so that losses differ from those of equal chances
                parameter.mul_(4.0).add_(torch.randn(parameter.shape, device=where, generator=generator), alpha=0.1)
        assert training_run.begin() > 0  # whole steps: the one that is compared is like all that follow
        said[name] = differ(training_run, cuts, device, mesh, rank, where)
        training_run.finish()
    if kind == "cpu":
        said["exchanges"] = (measure_exchanges(groups, instruments), measure_shared_experts(groups, instruments))
    (folder / f"{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    kind = sys.argv[2] if len(sys.argv) > 2 else "cpu"
    run = partial(run_rank, folder=Path(sys.argv[1]), kind=kind)
    raise SystemExit(fork_ranks(run, NUM_RANKS[kind], shared=IMPORTED_LATE))
