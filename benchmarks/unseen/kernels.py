"""How long components take on an unseen device: matrix products in tiles and waves, memory traffic, and a host.

Nothing here uses the roofline or the covariance of the search. A matrix product takes as long as its waves: its output
is cut into tiles, each multiprocessor computes one tile at a time, and the last wave counts nearly in full. Every
operation takes a few microseconds at least. Rates fall
once a product is long enough to reach the power limit. Working sets beyond the cache pay for it at a cliff. Each back
end has a tile, a rate and a fixed cost of its own, so that they cross over.
"""

from __future__ import annotations

import math

from benchmarks.unseen.draws import Draws
from bexp.explorer.cost.components import BlockRecompute, Component, ComponentKind
from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.model import ModelSpec

ITEM = 2  # bytes of a bfloat16 value
OPERATIONS = {
    ComponentKind.EMBEDDING: 3,
    ComponentKind.ATTENTION: 24,
    ComponentKind.DENSE_FFN: 7,
    ComponentKind.MOE_FFN: 34,
    ComponentKind.HEAD: 16,
    ComponentKind.OPTIMIZER: 12,
}
"""Operations that the host launches for one forward pass."""


class Kernels:
    """Seconds of every component, without noise."""

    def __init__(self, draws: Draws, hardware: HardwareSpec) -> None:
        self._draws = draws
        self._peak = max(hardware.matmul_flops_per_second.values())
        self._bandwidth = hardware.memory_bandwidth_bytes_per_second
        self._launch = hardware.launch_seconds
        self._num_processors = round(draws.between(60, 150, "processors"))
        self._least_seconds = draws.scale_between(1e-6, 6e-6, "least seconds")
        self._tail = draws.between(0.3, 1.0, "tail")
        self._cache_bytes = draws.scale_between(3e7, 3e8, "cache bytes")
        self._cache_cliff = draws.between(0.0, 0.12, "cache cliff")
        self._power_seconds = draws.scale_between(2e-4, 2e-2, "power seconds")
        self._power_fall = draws.between(0.0, 0.03, "power fall")

    def seconds(self, component: Component, model: ModelSpec) -> tuple[float, float]:
        """Return device and host seconds of a forward and backward pass, or of an optimizer step.

        Compiled code has the kernels of eager code and less traffic between them: a share by kind, a little of it by
        back end and by size.
        """
        if not component.is_compiled or component.backend is None:
            return self._eager_seconds(component, model)
        draws, kind, plain = self._draws, component.kind, component.backend.plain
        own = plain if any(plain) else None
        device, host = self._eager_seconds(component.model_copy(update={"backend": own}), model)
        share = draws.between(0.7, 1.03, "compiled", kind) + draws.between(-0.03, 0.03, "compiled", kind, own)
        jump = draws.between(-0.01, 0.01, "compiled", kind, own, component.micro_batch_size)
        return device * (share + jump), host * draws.between(0.25, 0.6, "compiled host", kind)

    def _eager_seconds(self, component: Component, model: ModelSpec) -> tuple[float, float]:
        draws, kind = self._draws, component.kind
        host = OPERATIONS[kind] * self._launch * draws.between(0.8, 2.0, "host", kind, component.backend)
        if kind is ComponentKind.OPTIMIZER:
            moved = 22.0 * count_parameters(model)
            return moved / (self._bandwidth * draws.between(0.6, 0.95, "optimizer")), host
        tiles = component.micro_batch_size // (component.bta_tile or component.micro_batch_size)
        at_once = component.micro_batch_size // tiles
        forward, again = self._forward(component, model, at_once)
        backward = draws.between(1.8, 2.7, "backward", kind, component.backend) * forward
        jump = 1.0 + draws.between(-0.015, 0.015, "jump", kind, component.backend, at_once, tiles)
        passes = 3.0 + (again > 0)
        if kind is ComponentKind.MOE_FFN and component.experts == "loop":
            passes *= 4.0  # a launch for each expert and product
        return tiles * (forward + backward + again) * jump, host * passes * tiles

    def _forward(self, component: Component, model: ModelSpec, batch: int) -> tuple[float, float]:
        """Return the seconds of a forward pass of `batch` sequences, and of what backward computes again."""
        tokens, width = batch * model.seq_length, model.hidden_size
        kind, recompute = component.kind, component.recompute
        if kind is ComponentKind.EMBEDDING:
            return self._traffic(6.0 * tokens * width * ITEM, "embedding"), 0.0
        if kind is ComponentKind.HEAD:
            product = self._product(tokens, model.vocab_size, width, "head")
            return product + self._traffic(3.0 * tokens * model.vocab_size * ITEM, "loss"), 0.0
        between = OPERATIONS[kind] * self._least_seconds + self._traffic(8.0 * tokens * width * ITEM, kind)
        if kind is ComponentKind.ATTENTION:
            heads = model.num_attention_heads * model.head_size
            grouped = model.query_groups * model.head_size
            first = self._product(tokens, heads + 2 * grouped, width, "qkv")
            core = self._attention_core(component.attention, batch, model)
            last = self._product(tokens, width, heads, "output")
        elif kind is ComponentKind.DENSE_FFN:
            columns = model.ffn_hidden_size * (2 if model.gated_mlp else 1)
            first, core = self._product(tokens, columns, width, "up"), 0.0
            last = self._product(tokens, width, model.ffn_hidden_size, "down")
        else:
            first, last = self._experts(component.experts, tokens, model)
            core = self._traffic(6.0 * tokens * width * ITEM, component.experts)
        forward = first + core + last + between
        again = {
            BlockRecompute.NONE: 0.0,
            BlockRecompute.SELECTIVE: core,
            BlockRecompute.ACTIVATIONS: between,
            BlockRecompute.PROJECTIONS: first + between,
            BlockRecompute.FULL: forward,
        }[recompute]
        if component.bta_tile is not None:
            again = forward
        if again:
            again *= self._draws.between(0.9, 1.15, "again", kind, recompute)
        return forward, again

    def _attention_core(self, backend: str | None, batch: int, model: ModelSpec) -> float:
        """Return the seconds of attention itself: programs of one head and 128 queries each, in waves."""
        rate = self._draws.between(0.25, 0.75, "rate", backend)
        programs = batch * model.num_attention_heads * math.ceil(model.seq_length / 128)
        a_program = 2.0 * 128 * model.seq_length * model.head_size * self._num_processors / (self._peak * rate)
        fixed = self._draws.scale_between(1e-6, 2e-5, "fixed", backend)
        return self._slow_down(fixed + self._waves(programs) * a_program)

    def _experts(self, backend: str | None, tokens: int, model: ModelSpec) -> tuple[float, float]:
        """Return the seconds of the products into and out of the experts."""
        moe = model.moe
        assert moe is not None
        rows = tokens * moe.top_k / moe.num_experts * (1.6 if backend == "bmm" else 1.0)
        hidden = moe.expert_ffn_hidden_size
        fixed = self._draws.scale_between(1e-6, 3e-5, "fixed", backend)
        if backend == "loop":
            fixed += moe.num_experts * 1e-6
        up = self._product(rows, (2 if model.gated_mlp else 1) * hidden, model.hidden_size, backend, moe.num_experts)
        down = self._product(rows, model.hidden_size, hidden, backend, moe.num_experts)
        return fixed + up, fixed + down

    def _product(self, rows: float, columns: int, inner: int, sort: object, number: int = 1) -> float:
        draws = self._draws
        high, wide = (int(2 ** draws.generator("tile", sort, axis).integers(6, 9)) for axis in ("rows", "columns"))
        tiles = number * math.ceil(rows / high) * math.ceil(columns / wide)
        rate = self._peak * draws.between(0.5, 0.95, "rate", sort) / self._num_processors
        computed = self._waves(tiles) * 2.0 * high * wide * inner / rate
        moved = ITEM * number * (rows * inner + inner * columns + rows * columns)
        return self._slow_down(max(computed, moved / self._bandwidth) * self._cliff(moved))

    def _waves(self, tiles: int) -> float:
        """Return the waves that tiles take: the last counts in part, by how well programs overlap."""
        full = tiles / self._num_processors
        return full + self._tail * (math.ceil(full) - full)

    def _traffic(self, moved: float, sort: object) -> float:
        rate = self._bandwidth * self._draws.between(0.5, 0.95, "traffic", sort)
        return 2e-6 + moved / rate * self._cliff(moved)

    def _cliff(self, moved: float) -> float:
        return 1.0 + (self._cache_cliff if moved > self._cache_bytes else 0.0)

    def _slow_down(self, seconds: float) -> float:
        """Return the seconds of a kernel that reaches the power limit if it runs for long."""
        return seconds * (1.0 + self._power_fall * max(0.0, math.log2(seconds / self._power_seconds)))
