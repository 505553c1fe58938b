"""The blocks of one device of a mesh: their components, parameters, and what they exchange with other devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bexp.explorer.cost.collectives import ASSUMED_SLOWDOWN
from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind, Operation, block_recompute
from bexp.explorer.cost.parameters import (
    count_attention,
    count_dense_ffn,
    count_embedding,
    count_head,
    count_moe_ffn,
    count_norm,
    repeated_in_attention,
    repeated_in_moe_ffn,
)
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import recomputed_layers
from bexp.explorer.meshes.mesh import Mesh
from bexp.explorer.meshes.shards import SHARED_EXPERTS, SPREAD_EXPERTS, expert_rows, shared_expert_model, tensor_shard
from bexp.explorer.meshes.transfers import Group, Transfer, Transfers
from bexp.explorer.model.model import LayerKind, ModelSpec
from bexp.explorer.model.training import Sharding
from bexp.explorer.request.request import ExplorationRequest

NOTHING = Transfer(0.0)
Task = tuple[float, int | None]
"""Seconds, and the place of the other resource's task that must end before; None if there is none."""


@dataclass(frozen=True, slots=True)
class ExpertOverlap:
    """The exchanges of a layer's experts for one micro-batch, one way."""

    degree: int
    """Chunks of rows."""
    moved: Transfer
    """The transfer of one chunk."""
    copied: Transfer
    """One exchange of weights of shadowed experts, or of sums of their gradients. There are `num_copies` of them."""
    home_share: float
    """The share of the computation that the shadowed experts take."""
    paired: Transfer = NOTHING
    """The transfer of the routing weights of a chunk's pairs of token and expert."""
    num_copies: int = 1
    local_bytes: int = 0
    """Read and written in one direction by the measured device, in place of exchanges of rows."""

    @property
    def issued_seconds(self) -> tuple[float, float]:
        """The seconds in which the host issues the exchanges of forward, and those of backward.

        Forward exchanges counts once. Of each chunk it exchanges rows, weights and routes, and the results. Backward
        exchanges the gradients of rows, weights and results.
        """
        once, copied = self.moved.host_seconds, self.num_copies * self.copied.host_seconds
        return (1 + 4 * self.degree) * once + copied, 3 * self.degree * once + copied

    def forward_seconds(self, computation: float) -> float:
        """Return the seconds of forward, whose experts compute for `computation` seconds by themselves.

        The device stands still after the host's wait, while the host issues exchanges. The first chunk arrives
        meanwhile.
        """
        started = 3 * self.degree * self.moved.host_seconds + self.num_copies * self.copied.host_seconds
        hidden = max(0.0, started - self._moved)
        return self.paired.seconds + hidden + self._overlapped(computation)

    def backward_seconds(self, computation: float) -> float:
        """Return the seconds of backward, in which the host waits for nothing."""
        return self._overlapped(computation, backward=True)

    @property
    def _moved(self) -> float:
        """Rows with their routing weights, or with their routes, which are as short."""
        return self.moved.seconds + self.paired.seconds

    def _overlapped(self, computation: float, *, backward: bool = False) -> float:
        """Return the seconds of the chunks, each of which computes while others move.

        Copies of weights arrive after the chunks of forward. Backward begins with their gradients, and sends them.
        """
        chunks, home, copied = range(self.degree), self.home_share * computation, self.num_copies * self.copied.seconds
        computed: list[Task] = [((1.0 - self.home_share) * computation / self.degree, chunk) for chunk in chunks]
        moves: list[Task] = [(self._moved, None) for _ in chunks]
        first = int(backward and home > 0.0)
        if first:
            computed.insert(0, (home, None))
            moves.append((copied, 0))
        elif home:
            computed.append((home, self.degree))
            moves.append((copied, None))
        moves += [(self._moved, first + chunk) for chunk in chunks]
        return run_overlapped(computed, moves)


def run_overlapped(computed: Sequence[Task], moved: Sequence[Task], slowdown: float = ASSUMED_SLOWDOWN) -> float:
    """Return when both resources have run their tasks, each in its order and as early as it can.

    While something is moved, computation is slower by `slowdown`.
    """
    now, done = 0.0, [0, 0]
    tasks = (computed, moved)
    left = [each[0][0] if each else 0.0 for each in tasks]
    while any(done[i] < len(tasks[i]) for i in (0, 1)):
        runs = [_is_ready(tasks[i], done[i], done[1 - i]) for i in (0, 1)]
        rates = (1.0 / (1.0 + slowdown) if runs[1] else 1.0, 1.0)
        i = min((i for i in (0, 1) if runs[i]), key=lambda i: left[i] / rates[i])
        passed = left[i] / rates[i]
        now += passed
        other = 1 - i
        if runs[other]:
            left[other] = max(0.0, left[other] - passed * rates[other])
        done[i] += 1
        left[i] = tasks[i][done[i]][0] if done[i] < len(tasks[i]) else 0.0
    return now


def _is_ready(tasks: Sequence[Task], place: int, others_done: int) -> bool:
    if place == len(tasks):
        return False
    after = tasks[place][1]
    return after is None or after < others_done


FLOAT32_BYTES = 4

Sort = tuple[LayerKind, bool]
"""A kind of layer, and whether it is recomputed as a whole."""


@dataclass(frozen=True, slots=True)
class MeshCandidate:
    """A mesh, and how each of its devices runs its share of a micro-batch."""

    mesh: Mesh
    candidate: Candidate

    @property
    def sharded(self) -> Candidate:
        """The candidate with the sharding of its mesh, as a trainer needs it."""
        return self.candidate.model_copy(update={"sharding": self.mesh.sharding})

    def describe(self) -> str:
        """Return one line for a person."""
        return f"{self.mesh.describe()} {self.candidate.describe()}"


@dataclass(frozen=True, slots=True)
class Block:
    """A block of one device, which a micro-batch passes once in each direction."""

    component: Component
    transfers: tuple[Transfer, ...] = ()
    """Those of forward. As many pass in backward, and nothing hides them."""
    parameters: int = 0
    """All but the `expert_parameters`, which fewer devices hold."""
    repeated_parameters: int = 0
    """Those of `parameters` that each tensor-parallel device has whole."""
    expert_parameters: int = 0
    sharded_outputs: int = 0
    """Tensors of the size of the hidden states that the block saves whole when it is measured by itself.

    Sequence parallelism leaves a device a part of them.
    """
    repeated_outputs: float = 0.0
    """Those of them that another block saves as well: shared experts are measured with a norm, and have none."""
    overlap: ExpertOverlap | None = None
    """The transfers of experts that devices share, while the component computes; these have no `transfers`."""

    def exposed_seconds(self, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds that transfers add to so many seconds of computation, in forward and in backward."""
        if self.overlap is not None:
            ahead, behind = self.overlap.forward_seconds(forward), self.overlap.backward_seconds(backward)
            return ahead - forward, behind - backward
        transferred = sum(transfer.seconds for transfer in self.transfers)
        return transferred, transferred

    @property
    def issued_seconds(self) -> tuple[float, float]:
        """The seconds in which the host issues the transfers of forward, and those of backward."""
        if self.overlap is not None:
            return self.overlap.issued_seconds
        issued = sum(transfer.host_seconds for transfer in self.transfers)
        return issued, issued


@dataclass(frozen=True)
class MeshBlocks:
    """The blocks of a candidate: those of embedding and head, and those of each sort of layer."""

    embedding: Block
    head: Block
    layers: tuple[Sort, ...]
    blocks: dict[Sort, tuple[Block, ...]] = field(hash=False)

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """Every distinct component, in the order of a step."""
        every = (self.embedding, *(block for blocks in self.blocks.values() for block in blocks), self.head)
        return tuple(dict.fromkeys(block.component for block in every))


class MeshDecomposer:
    """Splits candidates into blocks; equal components of different meshes are measured once."""

    def __init__(self, model: ModelSpec, request: ExplorationRequest, transfers: Transfers) -> None:
        self._model = model
        self._request = request
        self.transfers = transfers
        self._known: dict[tuple[object, ...], MeshBlocks] = {}
        self._shards: dict[int, ModelSpec] = {}

    def __call__(self, point: MeshCandidate) -> MeshBlocks:
        """Return the blocks of a candidate; the pipeline and data parallelism do not matter here."""
        mesh, candidate = point.mesh, point.candidate
        key = (mesh.block_key, candidate)
        if key not in self._known:
            self._known[key] = self._split(mesh, candidate)
        return self._known[key]

    def shard(self, size: int) -> ModelSpec:
        """Return what a tensor-parallel device has of the model."""
        if size not in self._shards:
            self._shards[size] = tensor_shard(self._model, size)
        return self._shards[size]

    def hidden_bytes(self, candidate: Candidate) -> int:
        """Return the bytes that one layer passes on to the next, over all tensor-parallel devices."""
        model = self._model
        return candidate.micro_batch_size * model.seq_length * model.hidden_size * model.dtype.itemsize

    def _split(self, mesh: Mesh, candidate: Candidate) -> MeshBlocks:
        shard, size = self.shard(mesh.tensor), mesh.tensor
        m = candidate.micro_batch_size
        gathered = self.transfers.gather(self.hidden_bytes(candidate), Group(size, 1))
        sorts = tuple(zip(self._model.layer_kinds, recomputed_layers(self._model, candidate.recompute), strict=True))

        def component(kind: ComponentKind, recompute: BlockRecompute, backend: str | None, **more: object) -> Component:
            values = {"kind": kind, "micro_batch_size": m, "recompute": recompute, "backend": backend}
            return Component.model_validate({**values, "tensor_parallel_size": size, **more})

        none = BlockRecompute.NONE
        return MeshBlocks(
            embedding=Block(
                component(ComponentKind.EMBEDDING, none, None),
                (gathered,),
                count_embedding(shard),
                count_embedding(shard) - shard.vocab_size * shard.hidden_size,
                sharded_outputs=1,
            ),
            head=Block(
                component(ComponentKind.HEAD, none, None),
                (gathered, *self._loss_transfers(m, size)),
                count_head(shard),
                count_norm(shard),
            ),
            layers=sorts,
            blocks={
                sort: tuple(self._blocks(sort, mesh, candidate, (gathered, gathered), component))
                for sort in dict.fromkeys(sorts)
            },
        )

    def _loss_transfers(self, m: int, size: int) -> tuple[Transfer, ...]:
        """Return the exchanges of ranks for the loss: two numbers of each token, chunk by chunk, in forward alone.

        A block's transfers pass in both directions, so each of these is one half of an exchange.
        """
        if size == 1:
            return ()
        tokens, loss = m * self._model.seq_length, self._request.training.loss
        chunk = min(tokens, loss.chunk_tokens) if loss.kind == "chunked" else tokens
        once, half = self.transfers.gather(2 * FLOAT32_BYTES * chunk * size, Group(size, 1)), tokens / chunk / 2
        return (Transfer(half * once.seconds, half * once.host_seconds),)

    def _norm_transfers(self, m: int, size: int) -> tuple[Transfer, ...]:
        """Return the exchanges of ranks for norms over all heads: two numbers of each token."""
        if size == 1 or self._model.qk_norm != "full":
            return ()
        return (self.transfers.gather(2 * FLOAT32_BYTES * m * self._model.seq_length * size, Group(size, 1)),)

    def _blocks(
        self,
        sort: Sort,
        mesh: Mesh,
        candidate: Candidate,
        around: tuple[Transfer, ...],
        component: Callable[..., Component],
    ) -> Iterator[Block]:
        kind, recomputed = sort
        shard = self.shard(mesh.tensor)

        def policy(of: ComponentKind) -> BlockRecompute:
            return BlockRecompute.FULL if recomputed else block_recompute(candidate.recompute, of, None)

        def spread(whole: Component, parameters: int, repeated: int, *inside: Transfer, outputs: float = 0.0) -> Block:
            return Block(
                whole,
                (*around, *inside),
                parameters,
                repeated,
                sharded_outputs=1,  # what its norm returns is gathered once, and kept whole for backward
                repeated_outputs=outputs,
            )

        attention, dense, experts = ComponentKind.ATTENTION, ComponentKind.DENSE_FFN, ComponentKind.MOE_FFN
        attending = component(attention, policy(attention), candidate.attention_backend)
        normed = self._norm_transfers(candidate.micro_batch_size, mesh.tensor)
        yield spread(attending, count_attention(shard), repeated_in_attention(shard), *normed)
        bias = shard.hidden_size if shard.mlp_bias else 0
        if kind is LayerKind.DENSE:
            yield spread(component(dense, policy(dense), None), count_dense_ffn(shard), count_norm(shard) + bias)
            return
        moe = self._model.moe
        assert moe is not None, "a layer with experts"
        factor = moe.capacity_factor
        routed = component(experts, policy(experts), candidate.expert_backend, capacity_factor=factor)
        has_shared = moe.shared_expert_ffn_hidden_size > 0
        if mesh.expert == 1:
            yield spread(routed, count_moe_ffn(shard), repeated_in_moe_ffn(shard) + bias * has_shared)
            return
        yield self.expert_block(mesh, routed)
        if has_shared:
            shared = component(dense, policy(dense), None, part=SHARED_EXPERTS)
            parameters = count_dense_ffn(shared_expert_model(shard)) - count_norm(shard)
            # The norm's input, and its output unless ranks gather that for the shared experts alone.
            repeated = 2 if mesh.tensor == 1 else 1
            yield spread(shared, parameters, bias, outputs=repeated / mesh.tensor)

    def expert_block(self, mesh: Mesh, block: Component) -> Block:
        """Return the experts of one of the devices that share them, given the component of a device that has all."""
        model, moe = self._model, self._model.moe
        assert moe is not None, "a layer with experts"
        degree, shadowed = mesh.overlap_degree, mesh.shadowed_experts
        component = block.model_copy(update={"part": SPREAD_EXPERTS, **mesh.expert_sizes})
        rows, group, item = expert_rows(component, model, self._request), Group(mesh.expert, 1), model.dtype.itemsize
        expert = (3 if model.gated_mlp else 2) * model.hidden_size * moe.expert_ffn_hidden_size
        repeated = repeated_in_moe_ffn(model)
        row_bytes = model.hidden_size * item
        copied = shadowed * expert * item
        num_copies = 2 * min(mesh.expert, shadowed)  # two matrices of each owner
        moved_rows = max(rows.moved_in, rows.moved_out)
        overlap = ExpertOverlap(
            degree,
            moved=self.transfers.take(Operation.ALL_TO_ALL, moved_rows / degree * row_bytes, group),
            paired=self.transfers.take(Operation.ALL_TO_ALL, rows.received / degree * item, group),
            copied=self.transfers.take(Operation.BROADCAST, copied / max(1, num_copies), group),
            home_share=rows.home / rows.computed,
            num_copies=num_copies,
            local_bytes=2 * (rows.moved_in + rows.moved_out) * row_bytes,
        )
        return Block(
            component,
            overlap=overlap,
            parameters=repeated,
            repeated_parameters=repeated,
            expert_parameters=moe.num_experts // mesh.expert * expert,
        )


def optimizer_component(tensor_sizes: tuple[int, ...]) -> Component:
    """Return the optimizer's component, which is timed on the smallest shard of the model and scaled to any other."""
    return Component(
        kind=ComponentKind.OPTIMIZER, micro_batch_size=0, sharding=Sharding.NONE, tensor_parallel_size=max(tensor_sizes)
    )
