"""The search over texts of unequal length, against drawn epochs: the choice, and the memory that it states."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Composition
from bexp.explorer.cost.request_texts import text_batches
from bexp.explorer.cost.step import memory_limit, required_bytes
from bexp.explorer.cost.text_batches import TextBatch, cut_epochs, fill, grouped_epoch, pack
from bexp.explorer.model.hardware import BackendSupport
from bexp.explorer.model.lengths import compact_histogram
from bexp.explorer.model.parts import LayerPart, ModelParts, Part
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.measurement import (
    ComponentMeasurement,
    Measurement,
    Outcome,
    PhaseSeconds,
    WholeModelMeasurement,
)
from bexp.explorer.records.trial import TrialKind, TrialTask
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.explore import explore
from bexp.explorer.search.legal_space import prune_space
from bexp.explorer.search.posterior import Posterior
from bexp.workers.profiler.trials.component import compose_batches
from tests.explorer.cost import described
from tests.explorer.explorations import best_of
from tests.explorer.measurements import measured
from tests.explorer.notes import notes_of
from tests.explorer.simulator import report

SEQ_LENGTH, LAYER_PARAMETERS, SHELL_PARAMETERS = 4096, 60_000_000, 260_000_000
EPOCHS = 40
Texts = NDArray[Any]


def chat(rng: np.random.Generator) -> Texts:
    return np.concatenate([rng.lognormal(5.6, 0.9, 9000), rng.normal(1500, 300, 1000)])


def code(rng: np.random.Generator) -> Texts:
    return np.concatenate([rng.gamma(1.3, 900, 7000), rng.uniform(3000, 9000, 3000)])


def long_tail(rng: np.random.Generator) -> Texts:
    return 40 * (1 + rng.pareto(1.1, 10_000))


@cache
def drawn(name: str) -> Texts:
    made = {"chat": chat, "code": code, "long_tail": long_tail}[name](np.random.default_rng(3))
    return np.maximum(1, np.round(made)).astype(np.int64)


def parts() -> ModelParts:
    figures = {"flops_per_token": 1.2e8, "flops_per_sequence": 6.9e10, "saved_bytes_per_token": 90e3}
    layer = LayerPart(name="layer", **described.part(LAYER_PARAMETERS, **figures))
    shell = Part(**described.part(SHELL_PARAMETERS, flops_per_token=5.2e8, saved_bytes_per_token=600e3))
    total = 16 * LAYER_PARAMETERS + SHELL_PARAMETERS
    return described.parts(
        seq_length=SEQ_LENGTH,
        layers=("layer",) * 16,
        kinds=[layer],
        shell=shell,
        output_bytes_per_token=4096,
        num_parameters=total,
        parameter_bytes=2 * total,
        trainable_bytes=2 * total,
        policies=("none", "partial_50", "full"),
        tiles=False,
    )


def device(memory_gib: float, attention_backends: tuple[str, ...] = ("sdpa",)) -> DeviceReport:
    attention = tuple(BackendSupport(name=name, usable=True) for name in attention_backends)
    found = report(memory_gib=memory_gib, experts=False)
    return found.model_copy(update={"parts": parts(), "attention_backends": attention, "default_attention": "sdpa"})


def request(name: str, batching: str, **changes: Any) -> ExplorationRequest:
    lengths, counts = np.unique(drawn(name), return_counts=True)
    found = compact_histogram(dict(zip(lengths.tolist(), counts.tolist(), strict=True)))
    asked = {
        "hf_config": {"model_type": "llama"},
        "hf_seq_length": SEQ_LENGTH,
        "lengths": [list(pair) for pair in found],
        "batching": batching,
        "losses": ["library"],
        "kernels": ["library"],
        **changes,
    }
    return ExplorationRequest.model_validate(asked)


class TextDevice:
    """A device whose kernels take waves, so that seconds are no smooth function of tokens, and some noise.

    One attention takes `new_width` seconds longer for the first micro-batch of a width, and another one never does.
    """

    def __init__(
        self, asked: ExplorationRequest, noise: float = 0.002, host: float = 1e-4, new_width: float = 0.0
    ) -> None:
        self.new_width = new_width
        self.request = asked
        self.host = host
        self.noise = noise
        self.rng = np.random.default_rng(0)

    def seconds(self, component: Component, positions: Any, pairs: Any) -> Any:
        if component.kind is ComponentKind.OPTIMIZER:
            return 0.02 + 0.0 * positions
        of_layer = component.kind is ComponentKind.LAYER
        per_token, per_pair = (1.2e8, 4.1e3) if of_layer else (5.2e8, 0.0)
        passes = 4.0 if component.recompute.is_whole else 3.0
        passes *= 1.0 if not of_layer or self.plans(component) else 1.07
        waves = np.ceil(positions / 256) * 256
        rate = 500e12 * waves / (waves + 2500)
        return 2e-4 + passes * (per_token * waves / rate + per_pair * pairs / 300e12)

    def plans(self, component: Component) -> bool:
        """Whether the attention of a layer is the one that plans its kernels for each width."""
        return component.backend is None or component.backend.attention == "sdpa"

    def weigh(self, component: Component, positions: Any) -> tuple[Any, Any, Any]:
        """Saved, forward-peak and backward-peak bytes; a layer that is recomputed is measured without that."""
        if component.kind is ComponentKind.OPTIMIZER:
            return 0, 0, 0
        saved = 100e3 * positions if component.kind is ComponentKind.LAYER else 620e3 * positions
        return saved, 1.1 * saved + 5e6, 1.2 * saved + 5e6

    def measured(self, component: Component, batch: TextBatch | None) -> ComponentMeasurement:
        at = (0, 0) if batch is None else (batch.positions, batch.pairs)
        device = float(self.seconds(component, *at)) * (1 + self.noise * float(self.rng.standard_normal()))
        saved, forward, backward = (round(float(size)) for size in self.weigh(component, at[0]))
        new_width = self.new_width * self.plans(component) if component.kind is ComponentKind.LAYER else None
        sizes = {"saved_bytes": saved, "forward_peak_bytes": forward, "backward_peak_bytes": backward}
        seconds = {"host_seconds": self.host, "standard_error_seconds": self.noise * device}
        return measured(component, device, new_width_seconds=new_width, **seconds, **sizes)

    def __call__(self, task: TrialTask) -> Measurement:
        batches = text_batches(self.request, task.candidate.micro_batch_size)
        assert batches is not None
        if task.kind is TrialKind.WHOLE_MODEL:
            table = Composition([task.candidate], task.model, self.request)
            each = [self.step(table, batch.positions, batch.pairs)[0, 0] for batch in batches.measured]
            peak = round(float(self.peaks(table, np.array([batches.longest.positions]))[0, 0]))
            whole = WholeModelMeasurement(
                micro_step_seconds=batches.expect(each)[0],
                optimizer_seconds=0.02,
                standard_error_seconds=1e-4,
                peak_bytes=peak,
                reserved_bytes=peak,
                repeats=3,
            )
            return Measurement(candidate=task.candidate, outcome=Outcome.OK, whole_model=whole)
        found = []
        for component in task.components:
            of_size = text_batches(self.request, component.micro_batch_size)
            if of_size is None:
                found.append(self.measured(component, None))
            else:
                found.append(compose_batches(of_size, [self.measured(component, one) for one in of_size.measured]))
        return Measurement(
            candidate=task.candidate, outcome=Outcome.OK, components=tuple(found), phases=PhaseSeconds(timed=0.2)
        )

    def step(self, table: Composition, positions: Any, pairs: Any) -> Any:
        """True seconds of the micro-steps of one size, shape (N, C)."""
        at, of = np.atleast_1d(positions).astype(float), np.atleast_1d(pairs).astype(float)
        device_NK = np.stack([np.broadcast_to(self.seconds(c, at, of), at.shape) for c in table.components], axis=1)
        nothing = np.zeros(len(table.components))
        device, host = (table.micro_step_seconds(each, nothing) for each in (device_NK, nothing[None] + self.host))
        return np.maximum(device, host)

    def peaks(self, table: Composition, positions: NDArray[Any]) -> NDArray[Any]:
        """True peaks of the micro-batches of the table's one size, shape (N, C)."""
        longest = text_batches(self.request, table.candidates[0].micro_batch_size)
        assert longest is not None
        found = []
        for number in positions:
            bytes_3K = np.array([self.weigh(c, number) for c in table.components], float).T
            share = number / longest.longest.positions
            found.append(table.static_bytes_C + np.add(*table.activation_bytes(*bytes_3K, share_of_longest=share)))
        return np.array(found)


@cache
def epochs(name: str, batching: str, size: int) -> tuple[NDArray[Any], NDArray[Any], float]:
    """Positions and pairs of the micro-batches of whole epochs of the texts themselves, and the tokens of each."""
    texts = np.minimum(drawn(name), SEQ_LENGTH)
    if batching == "packed":
        rows, rng = [], np.random.default_rng(11)
        for _ in range(4):
            shuffled = rng.permutation(texts)
            rows += [
                row for i in range(0, len(texts), 1000) for row in pack(shuffled[i : i + 1000].tolist(), SEQ_LENGTH)
            ]
        pairs = np.array([sum(n * n for n in row) + (SEQ_LENGTH - sum(row)) ** 2 for row in rows], float)
        places = cut_epochs(lambda seed: np.random.default_rng(seed).permutation(len(rows)), size, 3000)
        tokens = size * float(np.mean([sum(row) for row in rows]))
        return np.full(len(places), float(size * SEQ_LENGTH)), pairs[places].sum(axis=1), tokens
    if batching == "token_budget":
        rows, rng = [], np.random.default_rng(11)
        while len(rows) < 3000:
            rows += fill(rng.permutation(texts).tolist(), size * SEQ_LENGTH)
        filled = np.array([sum(row) for row in rows], float)
        return filled, np.array([sum(n * n for n in row) for row in rows], float), float(filled.mean())
    order = (
        grouped_epoch(texts, size) if batching == "grouped" else lambda s: np.random.default_rng(s).permutation(10_000)
    )
    drawn_NM = texts[cut_epochs(lambda seed: order(seed + 100), size, EPOCHS * len(texts) // size)]
    widths = drawn_NM.max(axis=1).astype(float)
    return size * widths, size * widths**2, float(drawn_NM.sum(axis=1).mean())


def truth(found: TextDevice, name: str, batching: str, memory: DeviceReport) -> tuple[dict[Any, float], dict[Any, Any]]:
    """True tokens/s of every candidate whose micro-batches of all epochs fit, and the peaks of each candidate."""
    space = prune_space(parts(), found.request, memory)
    assert space.table is not None
    limit = memory_limit(found.request, memory.hardware)
    rates: dict[Any, float] = {}
    peaks: dict[Any, Any] = {}
    for size in sorted({c.micro_batch_size for c in space.table.candidates}):
        table = Composition([c for c in space.table.candidates if c.micro_batch_size == size], parts(), found.request)
        positions, pairs, tokens = epochs(name, batching, size)
        share = found.request.devices.batch_share / size
        step_C = share * found.step(table, positions, pairs).mean(axis=0) + 0.02
        known, inverse = np.unique(positions, return_inverse=True)
        peak_NC = found.peaks(table, known)
        for i, candidate in enumerate(table.candidates):
            peaks[candidate] = peak_NC[inverse, i]
            if required_bytes(round(peak_NC[:, i].max()), memory.hardware, "default") <= limit:
                rates[candidate] = share * tokens / float(step_C[i])
    return rates, peaks


@pytest.mark.parametrize(
    ("name", "batching"),
    [("code", "padded"), ("long_tail", "grouped"), ("chat", "packed"), ("long_tail", "token_budget")],
)
def test_the_choice_is_near_the_best_of_all_and_no_epoch_needs_more_memory(name: str, batching: str) -> None:
    memory, asked = device(64), request(name, batching)
    found = TextDevice(asked)
    best = best_of(list(explore(asked, memory, found)))
    rates, peaks = truth(found, name, batching, memory)
    assert len(rates) > 3
    assert best.candidate in rates, "no micro-batch of any epoch is too large"
    assert rates[best.candidate] >= 0.98 * max(rates.values())
    assert best.tokens_per_second == pytest.approx(rates[best.candidate], rel=0.02)
    texts = best.texts
    assert texts is not None
    own = peaks[best.candidate]
    assert own.max() <= 1.001 * best.measured_peak_bytes
    assert (own > 1.001 * texts.high_peak_bytes).mean() <= 0.002
    assert own.mean() == pytest.approx(texts.expected_peak_bytes, rel=0.03)
    assert texts.num_texts == 10_000
    assert texts.num_cut == pytest.approx((drawn(name) > SEQ_LENGTH).sum(), rel=0.01), "lengths that are near are one"
    positions, _, tokens = epochs(name, batching, best.candidate.micro_batch_size)
    assert texts.padding_share == pytest.approx(1 - tokens / positions.mean(), abs=0.02)
    assert texts.out_of_memory_probability < 0.2


@pytest.mark.parametrize("size", [1, 4])
def test_the_host_decides_for_each_micro_batch_and_not_for_their_mean(size: int) -> None:
    asked = request("chat", "padded", micro_batch_size=[size], recompute=["none"], verify=False)
    memory, found = device(64), TextDevice(asked, host=3e-3)
    best = best_of(list(explore(asked, memory, found)))
    rates, _ = truth(found, "chat", "padded", memory)
    assert best.tokens_per_second == pytest.approx(rates[best.candidate], rel=0.02)


def test_another_run_in_flight_does_not_hide_how_unequal_micro_batches_are() -> None:
    asked = request("chat", "padded", micro_batch_size=[4], recompute=["none"])
    space = prune_space(parts(), asked, device(64))
    assert space.table is not None
    state = Posterior(space.table, space.legal.candidates, asked, device(64).hardware)
    components = state.missing(0)
    task = TrialTask(
        number=0,
        kind=TrialKind.COMPONENTS,
        model=parts(),
        candidate=space.table.candidates[0],
        components=components,
        timeout_seconds=1.0,
    )
    state.knowledge.learn(0, TextDevice(asked)(task))
    known, expected = state.surrogate.texts, state.surrogate.expecting(components).texts
    assert known is not None and expected is not None
    assert known.drawn_BK.std() > 0
    assert expected.drawn_BK == pytest.approx(known.drawn_BK)


@pytest.mark.parametrize(("new_width", "attention"), [(0.0, "sdpa"), (0.3, "sdpa:efficient")])
def test_what_the_first_micro_batch_of_a_width_takes_counts_for_the_whole_epoch(
    new_width: float, attention: str
) -> None:
    asked = request("chat", "padded", micro_batch_size=[4], recompute=["none"], budget={"confidence_target": 90})
    memory, found = device(64, ("sdpa", "sdpa:efficient")), TextDevice(asked, new_width=new_width)
    best = best_of(list(explore(asked, memory, found)))
    assert best.candidate.attention_backend == attention
    assert not any("pad_to_multiple_of" in note for note in notes_of(best))
    rates, _ = truth(found, "chat", "padded", memory)
    assert best.tokens_per_second == pytest.approx(rates[best.candidate], rel=0.02)


def test_an_attention_that_plans_for_each_width_and_has_no_rival_is_as_slow_as_an_epoch_is() -> None:
    asked = request("chat", "padded", micro_batch_size=[4], recompute=["none"], budget={"confidence_target": 90})
    memory, found = device(64), TextDevice(asked, new_width=0.3)
    best = best_of(list(explore(asked, memory, found)))
    rates, _ = truth(found, "chat", "padded", memory)
    cut, order = np.minimum(drawn("chat"), SEQ_LENGTH), np.random.default_rng(5).permutation(10_000)
    widths = cut[order].reshape(-1, 4).max(axis=1)
    tokens = cut.mean()
    share, step = asked.devices.batch_share / 4, asked.devices.batch_share * tokens / rates[best.candidate]
    slowed = asked.devices.batch_share * tokens / (step + share * 0.3 * len(np.unique(widths)) / len(widths))
    assert slowed < 0.8 * rates[best.candidate]
    assert best.tokens_per_second == pytest.approx(slowed, rel=0.03)
    assert best.whole_model is not None
    assert best.whole_model.tokens_per_second == pytest.approx(slowed, rel=0.03)
    (note,) = (note for note in notes_of(best) if "pad_to_multiple_of" in note)
    assert "takes 0.30 s longer" in note
