"""The answers whose exports the frameworks read."""

from __future__ import annotations

from explorer.spec.candidate import Recompute
from tests.explorer.exports.samples import OURS, SHARDED, candidate, exploration

ANSWERS = {
    "plain": exploration(),
    "replaced": exploration(OURS, stock=candidate(4)),
    "recomputed": exploration(candidate(recompute=Recompute.FULL)),
    "partial": exploration(candidate(recompute=Recompute.PARTIAL_25)),
    "selective": exploration(candidate(recompute=Recompute.SELECTIVE)),
    "compiled": exploration(execution="compile"),
    "expandable": exploration(allocator="expandable_segments"),
    "chunked": exploration(candidate(loss="chunked"), losses=["library", "chunked"]),
    "pinned": exploration(candidate(attention_backend="sdpa:cudnn")),
    "zero1": exploration(num_devices=8, training={"sharding": "zero1"}),
    "zero2": exploration(num_devices=8, training={"sharding": "zero2"}),
    "zero3": exploration(candidate(recompute=Recompute.FULL), **SHARDED),
    "shared": exploration(
        candidate(context_parallel_size=2, context_parallel_layout="zigzag"),
        num_devices=8,
        context_parallel={"sizes": [2]},
    ),
}
