"""Measures the host's work for communication in a step: hooks, copies, events, and issuing collectives.

If micro-batches are small, the device waits for this work. The work hardly depends on sizes, so it is measured on a
miniature of the model. The miniature has the same number of parameter tensors per layer, but almost nothing to compute
or to send. All ranks train it together, then each trains it alone. The difference is scaled to the model's number of
units.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from bexp.measure.timing import collector_paused
from explorer.cost_model.collectives import ExchangeUnits
from explorer.spec.candidate import Candidate
from explorer.spec.model import ModelSpec
from explorer.spec.request import ExplorationRequest
from workers.profiler.instruments import Instruments
from workers.profiler.training.run import EXCHANGING_MICRO_STEPS, ReferenceTrainingRun

NUM_LAYERS = 4
WIDTH, HEADS, TOKENS, WORDS = 64, 2, 16, 64
"""Sizes of the miniature. A head is 32 wide, so that rotary embeddings work."""
STEPS = 5


@dataclass(frozen=True, slots=True)
class HostOverhead:
    """Seconds of the host: `each` in every micro-step, `once` more in the first and the last of a step together."""

    each: float
    once: float


def measure_host_overhead(instruments: Instruments, model: ModelSpec, request: ExplorationRequest) -> HostOverhead:
    """The host's work in a step of the whole model. All ranks must call this at the same time."""
    small = _miniature(model)
    changed = request.model_copy(update={"model": small, "execution": "eager"})
    candidate = Candidate(micro_batch_size=1, attention_backend="math", num_query_groups=small.query_groups)
    together, alone = (_seconds(instruments, candidate, changed, together=both) for both in (True, False))
    share = ExchangeUnits.of(model).number / ExchangeUnits.of(small).number
    each, once = (max(0.0, share * (a - b)) for a, b in zip(together, alone, strict=True))
    return HostOverhead(*instruments.rank_group.all_reduce_max(each, once))


def _seconds(
    instruments: Instruments, candidate: Candidate, request: ExplorationRequest, *, together: bool
) -> tuple[float, float]:
    """Return host seconds in each micro-step, and additional ones once per step: medians of several steps."""
    training = ReferenceTrainingRun(instruments, request.model, candidate, request, together=together)
    training.begin()
    each, once = [], []
    with collector_paused():
        for _ in range(STEPS):
            seconds = []
            instruments.rank_group.all_reduce_max(0.0)  # all begin together
            instruments.synchronize()
            for i in range(EXCHANGING_MICRO_STEPS):
                started = time.perf_counter()
                training.micro_step(min(i, training.num_micro_steps - 1))
                seconds.append(time.perf_counter() - started)
            training.update()
            each.append(seconds[1])
            once.append(sum(seconds) - EXCHANGING_MICRO_STEPS * seconds[1])
    training.finish()
    return statistics.median(each), statistics.median(once)


def _miniature(model: ModelSpec) -> ModelSpec:
    """Return a small model of the same kind. Its FFNs are dense, because experts have as few parameter tensors."""
    sizes = {
        "num_layers": NUM_LAYERS,
        "hidden_size": WIDTH,
        "ffn_hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_query_groups": HEADS if model.query_groups == model.num_attention_heads else 1,
        "head_dim": WIDTH // HEADS,
        "rotary_fraction": 1.0,
        "vocab_size": WORDS,
        "seq_length": TOKENS,
        "max_position_embeddings": None,
        "moe": None,
    }
    return ModelSpec.model_validate(model.model_dump() | sizes)
