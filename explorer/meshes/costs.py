"""Seconds and bytes of one device of a mesh: of its layers, and of the stages of a pipeline that consist of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.cost.step import GatheredBytes
from bexp.explorer.meshes.layers import Block, MeshBlocks, Sort
from bexp.explorer.meshes.mesh import Mesh
from bexp.explorer.meshes.pipeline import StageCosts
from bexp.explorer.meshes.transfers import Transfer

NORMED = {ComponentKind.ATTENTION, ComponentKind.DENSE_FFN, ComponentKind.MOE_FFN}
"""Blocks that begin with a norm and end with the sum of the residual."""
FORWARD_TENSORS, BACKWARD_TENSORS = 5, 6
"""Tensors of the size of the hidden states that norm and sum read and write.

The norm reads one and writes one, and the sum reads two and writes one. In backward the norm reads two and writes one,
and the sum of two gradients reads two and writes one.
"""
NORM_FORWARD_TENSORS, NORM_BACKWARD_TENSORS = 2, 3
"""Those of the norm alone."""
HOST_FORWARD_SHARE = 0.5
"""Share of the host's time for a block that forward takes: backward has more kernels, which cost the host less each."""
LEAST_KEPT = 0.5
"""A block takes at least this share of what it was measured to take."""


@dataclass(frozen=True, slots=True)
class TogetherCost:
    """Seconds of a block that devices run together: their own, and the host's, for forward and backward.

    `host_forward` passes in one of several forwards in a row, where the host has no lead.
    """

    forward: float
    backward: float
    host_forward: float
    host_backward: float


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds and bytes of a component on one device."""

    device_seconds: float
    host_seconds: float
    forward_share: float
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    relative_error: float
    spared_share: float = 0.0
    """The share by which the bytes may be smaller; 0 if they are measured."""
    together: TogetherCost | None = None
    """For experts that devices share, once these were measured on them.

    These seconds contain the transfers, and the host's wait for the device in forward.
    """

    @property
    def host_ahead(self) -> float:
        """The host's seconds for forward.

        A host that is slower than the device sets the measured pace, so the shares of both directions are its own.
        """
        if self.together is not None:
            return self.together.host_forward
        share = self.forward_share if self.host_seconds >= self.device_seconds else HOST_FORWARD_SHARE
        return share * self.host_seconds

    @property
    def host_behind(self) -> float:
        """The host's seconds for backward."""
        if self.together is not None:
            return self.together.host_backward
        share = self.forward_share if self.host_seconds >= self.device_seconds else HOST_FORWARD_SHARE
        return (1.0 - share) * self.host_seconds


Costs = Mapping[Component, BlockCost]
Makeup = Mapping[Component | None, float]
"""Shares of seconds by part: a component, or None for the exchanges between devices."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds and bytes of a layer for one micro-batch."""

    forward: float
    """The device's seconds. Like those of `backward`, they contain the transfers."""
    backward: float
    transfers: float
    host_ahead: float
    """The host's seconds for forward. A host that is slower than the device sets the pace of a stage."""
    host_behind: float
    """The host's seconds for backward."""
    waits: bool
    """Whether the host waits for the device in each forward."""
    saved_bytes: int
    transient_bytes: int
    output_bytes: int
    """Passed on to the next layer by a device, and received as their gradient."""
    makeup: Makeup

    @property
    def host(self) -> float:
        """The host's seconds for both directions."""
        return self.host_ahead + self.host_behind

    @property
    def seconds(self) -> float:
        """Both directions, by themselves."""
        if self.waits:
            return max(self.forward, self.host_ahead) + max(self.backward, self.host_behind)
        return max(self.forward + self.backward, self.host)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The blocks of a candidate with their costs, by sort of layer."""

    blocks: MeshBlocks
    by_sort: dict[Sort, LayerCost]
    embedding: LayerCost
    head: LayerCost

    def parts(self, sorts: Counter[Sort], stage: int, num_stages: int) -> list[tuple[LayerCost, int]]:
        """Return the parts of a stage, each with its number."""
        parts = [(self.by_sort[sort], count) for sort, count in sorts.items()]
        if stage == 0:
            parts.append((self.embedding, 1))
        if stage == num_stages - 1:
            parts.append((self.head, 1))
        return parts


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The share that a tensor-parallel device has of a micro-batch."""

    hidden_bytes: int
    """Those that a layer passes on over all tensor-parallel devices."""
    bandwidth: float
    """Bytes that a device reads and writes a second."""

    def spared_seconds(self, block: Block, tensor: int) -> tuple[float, float]:
        """Return by how much a block is faster than measured, in forward and in backward.

        A block is measured with norm and residual sum over all tokens, and sequence parallelism leaves a device a part
        of the tokens. At the device's bandwidth their reads and writes take the least time that they can; it is taken
        off. Experts that devices share are measured with copies in place of exchanges. The copies are taken off in the
        same way, and so is the norm of shared experts, which use that of the others. Operations that run again in
        backward are taken off there once more.
        """
        if block.overlap is not None:
            first = rest = block.overlap.local_bytes / self.bandwidth
        elif block.component.kind in NORMED:
            once = self.hidden_bytes / self.bandwidth
            elsewhere, norm = 1.0 - 1.0 / tensor, 1.0 / tensor if block.repeated_outputs else 0.0
            first = (FORWARD_TENSORS * elsewhere + NORM_FORWARD_TENSORS * norm) * once
            rest = (BACKWARD_TENSORS * elsewhere + NORM_BACKWARD_TENSORS * norm) * once
        else:
            first = rest = 0.0
        return first, rest + (first if block.component.recompute is BlockRecompute.FULL else 0.0)


def compose_layer(
    blocks: Sequence[Block], costs: Costs, share: DeviceShare, mesh: Mesh, sort: Sort | None
) -> LayerCost:
    """Compose a layer of one device; `sort` is None for embedding and head."""
    hidden = share.hidden_bytes
    again = sort is not None and sort[1]
    forward = backward = transferred = 0.0
    host_ahead = host_behind = 0.0
    held = peak = 0
    makeup: defaultdict[Component | None, float] = defaultdict(float)
    whole = 1.0 - 1.0 / mesh.tensor
    for block in blocks:
        cost = costs[block.component]
        first, rest = _passes(block, cost, share, mesh)
        issued_ahead, issued_behind = block.issued_seconds if cost.together is None else (0.0, 0.0)
        host_ahead += cost.host_ahead + issued_ahead
        host_behind += cost.host_behind + issued_behind + again * issued_ahead
        forward, backward = forward + first, backward + rest
        passed = rest - first if block.component.recompute is BlockRecompute.FULL else rest
        makeup[block.component] += first + rest
        if cost.together is not None:  # with whatever runs again in backward
            ahead, behind = max(0.0, cost.together.forward - first), max(0.0, cost.together.backward - rest)
        else:
            ahead, behind = block.exposed_seconds(first, passed)
            behind += again * ahead
        forward, backward, transferred = forward + ahead, backward + behind, transferred + ahead + behind
        for transfer in block.transfers:
            makeup[None] += (3 if again else 2) * transfer.seconds
        if block.overlap is not None:
            makeup[None] += ahead + behind
        kept = round((block.sharded_outputs * whole + block.repeated_outputs) * hidden)
        peak = max(peak, held - kept + max(cost.forward_peak_bytes, cost.backward_peak_bytes))
        held += max(0, cost.saved_bytes - kept)
    output = round(hidden / mesh.tensor)
    saved = output if again else held
    transient = max(0, peak + output - saved)
    waits = any(block.overlap is not None for block in blocks)
    return LayerCost(
        *(forward, backward, transferred, host_ahead, host_behind, waits),
        saved_bytes=saved,
        transient_bytes=transient,
        output_bytes=output,
        makeup=makeup,
    )


def _passes(block: Block, cost: BlockCost, share: DeviceShare, mesh: Mesh) -> tuple[float, float]:
    """Return the device seconds of a block's forward and backward pass."""
    first = cost.device_seconds * cost.forward_share
    rest = cost.device_seconds - first
    spared_first, spared_rest = share.spared_seconds(block, mesh.tensor)
    first, rest = max(LEAST_KEPT * first, first - spared_first), max(LEAST_KEPT * rest, rest - spared_rest)
    if cost.together is not None:
        return min(first, cost.together.forward), min(rest, cost.together.backward)
    return first, rest


def stage_costs(
    parts: Sequence[tuple[LayerCost, int]], gathered: GatheredBytes, issued: float, sent: Transfer, layers: LayerCosts
) -> StageCosts:
    """Return the costs of a stage; its host issues the exchanges with neighbours in `issued` seconds.

    The longer of host and device sets the pace: see `_paces`. While a layer runs, the head has freed what it saves of
    the same micro-batch. While the embedding runs, all other parts have.
    """
    of_head = sum(count * part.saved_bytes for part, count in parts if part is layers.head)
    of_layers = sum(count * part.saved_bytes for part, count in parts if part is not layers.embedding) - of_head

    def transient(part: LayerCost) -> int:
        if part is layers.embedding:
            return part.transient_bytes - of_layers - of_head
        if part is layers.head:
            return part.transient_bytes + gathered.at_head
        # Its last buffer begins when it has freed all but the gradient that goes on to the layer below.
        running = max(part.transient_bytes - gathered.after_layer, part.output_bytes - part.saved_bytes)
        return running + gathered.at_layer - of_head

    ahead, behind = _paces(parts, issued, layers)
    return StageCosts(
        forward=sum(count * part.forward * (behind if part is layers.head else ahead) for part, count in parts),
        backward=behind * sum(count * part.backward for part, count in parts),
        saved_bytes=sum(count * part.saved_bytes for part, count in parts),
        transient_bytes=max(0, *(transient(part) for part, _ in parts)),
        hand_over=sent.seconds,
        host_bound=max(ahead, behind) > 1.0,
    )


def _paces(parts: Sequence[tuple[LayerCost, int]], issued: float, layers: LayerCosts) -> tuple[float, float]:
    """Return how many times slower the host makes the device of a stage: before the head, and from there on.

    The host runs ahead of the device, so the longer of the two over both directions sets the pace. A host that waits
    for the device in each layer's forward cannot save time there for later. The head and backward follow the last wait.
    """
    passes = [
        (count * part.forward, count * part.backward, count * part.host_ahead, count * part.host_behind, part)
        for part, count in parts
    ]
    backward, behind = sum(each[1] for each in passes), sum(each[3] for each in passes) + issued / 2
    forward, ahead = sum(each[0] for each in passes), sum(each[2] for each in passes) + issued / 2
    if not any(part.waits for part, _ in parts):
        slower = max(1.0, (ahead + behind) / (forward + backward))
        return slower, slower
    of_head = [each for each in passes if each[4] is layers.head]
    late, issued_late = sum(each[0] for each in of_head), sum(each[2] for each in of_head)
    return max(1.0, (ahead - issued_late) / (forward - late)), max(1.0, (behind + issued_late) / (backward + late))
