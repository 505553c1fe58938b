"""Seconds and bytes of a pipeline's stage, composed of those of its layers, embedding and head."""

from __future__ import annotations

from collections.abc import Sequence

from bexp.explorer.cost_model.mesh_costs import LayerCost, LayerCosts
from bexp.explorer.cost_model.pipeline import StageCosts
from bexp.explorer.cost_model.step import GatheredBytes
from bexp.explorer.cost_model.transfers import Transfer


def stage_costs(
    parts: Sequence[tuple[LayerCost, int]],
    gathered: GatheredBytes,
    issued: float,
    sent: Transfer,
    layers: LayerCosts,
) -> StageCosts:
    """Return the costs of a stage; its host issues what neighbours exchange in `issued` seconds.

    The longer of host and device sets the pace: see `_paces`. While a layer runs, the head has freed what it saves of
    the same micro-batch, and while the embedding runs, all others have.
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
        weights=behind * sum(count * part.weights for part, count in parts),
        saved_bytes=sum(count * part.saved_bytes for part, count in parts),
        transient_bytes=max(0, *(transient(part) for part, _ in parts)),
        hand_over=sent.seconds,
        host_bound=max(ahead, behind) > 1.0,
    )


def _paces(parts: Sequence[tuple[LayerCost, int]], issued: float, layers: LayerCosts) -> tuple[float, float]:
    """Return how many times slower the host makes the device of a stage, before the head and from there on.

    The host runs ahead of the device, so that the longer of the two over both directions sets the pace. If it waits for
    the device in each layer's forward, it cannot save time there for later; the head and backward follow the last wait.
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
