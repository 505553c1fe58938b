"""The posterior of every component's seconds and bytes, given those that were measured.

Seconds are modelled by a Gaussian process over the logarithm of measured over roofline seconds, one for each kind of
component. Its hyperparameters, noise included, are learnt with it (`bexp.explorer.surrogate.hyperparameters`). Each
posterior sample has its own hyperparameters, drawn from their posterior. Matheron's rule (Wilson et al., 2020,
arXiv:2002.09309) computes it from prior samples that are drawn once a job. So a refit costs one solve in the number of
measurements.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bexp.explorer.cost.collectives import ASSUMED_SLOWDOWN, FORWARD_SHARES, Overlap
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Composition, Floats, Ints, Mask, VariedTexts, predict_component_table
from bexp.explorer.cost.roofline import predict_component_seconds
from bexp.explorer.cost.text_batches import NUM_DRAWN
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.records.measurement import ComponentMeasurement
from bexp.explorer.surrogate.hyperparameters import Covariance, Evidence, HyperparameterPosterior, Hyperparameters
from bexp.explorer.surrogate.observations import SHORTEST_SECONDS, ComponentObservations
from bexp.explorer.surrogate.step_shape import StepShape

HOST_STD_RUN = 0.1
HOST_STD_NEAR = 0.15
HOST_STD_KIND = 0.3
HOST_STD_PRIOR = 0.5
"""Relative standard deviations of host seconds: between two runs of a component, and of a component that was not run.
The latter are for a run of the same back end and mode, for one of the same kind, and for none that is similar.

In benchmarks/results/tables, components with several runs differ by 7 to 15% in the median, and similar components of
different sizes by 16%.
"""
BYTES_STD_NEAR = 0.03  # relative error of predicted bytes if the same back end and mode was measured
BYTES_STD_KIND = 0.10  # if only the same kind was
BYTES_STD_PRIOR = 0.25  # if nothing similar was


def estimate_host_seconds(
    components: Sequence[Component],
    predicted_K: Floats,
    device_K: Floats,
    observed: Mapping[Component, ComponentObservations],
) -> tuple[Floats, Floats]:
    """Return host seconds and their relative standard deviation, each of shape (K,).

    They depend on the launches and hardly on sizes. So a component that was not run has those of similar ones, even if
    the device would need less: then the host sets the pace. If nothing similar was run, they are at most the device's,
    because a guess must not keep a component from being measured. They are zero for a block that waits for the device
    or runs on the host itself, and for similar blocks: their only time is the device's.
    """
    column = {c: i for i, c in enumerate(components)}
    launching = {c: r for c, r in observed.items() if not r.waits}
    waiting = {_similar(c) for c, r in observed.items() if r.waits}
    near, kind = _mean_ratios(
        {c: np.array([max(r.host_seconds, SHORTEST_SECONDS) / predicted_K[column[c]]]) for c, r in launching.items()}
    )
    host_K = predicted_K.copy()
    std_K = np.full(len(components), HOST_STD_PRIOR)
    known = {column[c]: r for c, r in observed.items()}  # an integer is hashed faster than a component
    for i, component in enumerate(components):
        runs = known.get(i)
        if runs is not None:
            host_K[i] = 0.0 if runs.waits else runs.host_seconds
            std_K[i] = HOST_STD_RUN / np.sqrt(len(runs.runs))
        elif _similar(component) in waiting:
            host_K[i], std_K[i] = 0.0, HOST_STD_NEAR
        elif _similar(component) in near:
            host_K[i] *= near[_similar(component)][0]
            std_K[i] = HOST_STD_NEAR
        else:
            if component.kind in kind:
                host_K[i] *= kind[component.kind][0]
                std_K[i] = HOST_STD_KIND
            host_K[i] = min(host_K[i], device_K[i])
    return host_K, std_K


def estimate_new_widths(components: Sequence[Component], observed: Mapping[Component, ComponentObservations]) -> Floats:
    """Return the additional seconds of components when a process first runs rows of a width, shape (K,).

    They depend on the kernels and hardly on sizes, so a component without a measurement has the mean of similar ones.
    Without any they are 0, because a guess must not keep a component from being measured.
    """
    known = {c: seconds for c, runs in observed.items() if (seconds := runs.new_width_seconds) is not None}
    near: dict[object, list[float]] = {}
    for component, seconds in known.items():
        near.setdefault(_similar(component), []).append(seconds)
    return np.array([known[c] if c in known else float(np.mean(near.get(_similar(c), 0.0))) for c in components])


def estimate_bytes(
    components: Sequence[Component], predicted_3K: Floats, observed: Mapping[Component, ComponentObservations]
) -> tuple[Floats, Floats]:
    """Return saved, forward-peak and backward-peak bytes, shape (3, K), and their relative deviations, shape (K,)."""
    column = {c: i for i, c in enumerate(components)}
    near, kind = _mean_ratios(
        {
            c: np.maximum(np.array(r.sizes, dtype=np.float64), 1.0) / np.maximum(predicted_3K[:, column[c]], 1.0)
            for c, r in observed.items()
        }
    )
    bytes_3K = predicted_3K.copy()
    std_K = np.full(len(components), BYTES_STD_PRIOR)
    known = {column[c]: r for c, r in observed.items()}
    for i, component in enumerate(components):
        if i in known:
            bytes_3K[:, i] = known[i].sizes
            std_K[i] = 0.0
        elif _similar(component) in near:
            bytes_3K[:, i] *= near[_similar(component)]
            std_K[i] = BYTES_STD_NEAR
        elif component.kind in kind:
            bytes_3K[:, i] *= np.clip(kind[component.kind], 0.5, 2.0)
            std_K[i] = BYTES_STD_KIND
    return bytes_3K, std_K


def estimate_forward_shares(table: Composition, observed: Mapping[Component, ComponentObservations]) -> Floats:
    """Return the share of forward in each component's device seconds, shape (K,).

    It is the measured share of the component, else the mean of its kind with the same recomputation. Without either, a
    backward pass is assumed to take two forward passes, and a third if the whole block is recomputed.
    """
    alike: dict[tuple[object, ...], list[float]] = {}
    for component, runs in observed.items():
        alike.setdefault(_policy(component), []).append(runs.forward_share)
    shares_K = np.empty(len(table.components))
    for i, component in enumerate(table.components):
        if component in observed:
            shares_K[i] = observed[component].forward_share
        elif _policy(component) in alike:
            shares_K[i] = np.mean(alike[_policy(component)])
        elif component.kind is ComponentKind.COMMUNICATION:
            shares_K[i] = FORWARD_SHARES[table.request.sharded(component.sharding).training.sharding]
        else:
            shares_K[i] = 1 / 4 if component.recompute.is_whole else 1 / 3
    return shares_K


def _policy(component: Component) -> tuple[object, ...]:
    return (component.kind, component.recompute, component.bta_tile is not None, component.sharding)


def _similar(component: Component) -> tuple[object, ...]:
    """Return the key that similar components share. All layouts over one number of devices are similar."""
    ring = component.context_parallel_size if component.communicates else 1
    return (component.kind, component.backend, component.recompute, component.bta_tile is not None, ring)


def _mean_ratios(
    ratios: Mapping[Component, Floats],
) -> tuple[dict[tuple[object, ...], Floats], dict[ComponentKind, Floats]]:
    """Return geometric means of `ratios` over similar components, and over kinds."""
    near: dict[tuple[object, ...], list[Floats]] = {}
    kind: dict[ComponentKind, list[Floats]] = {}
    for component, ratio in ratios.items():
        near.setdefault(_similar(component), []).append(np.log(ratio))
        kind.setdefault(component.kind, []).append(np.log(ratio))
    return (
        {key: np.exp(np.mean(logs, axis=0)) for key, logs in near.items()},
        {key: np.exp(np.mean(logs, axis=0)) for key, logs in kind.items()},
    )


JITTER = 1e-10


class _KindPrior:
    """The components of one kind: their columns, their covariance, and N samples of its parts before scaling."""

    def __init__(
        self,
        columns: Ints,
        covariance: Covariance,
        num_samples: int,
        rng: np.random.Generator,
        shape: StepShape | None = None,
    ) -> None:
        self.columns = columns
        self.covariance = covariance
        self._shape = shape
        size = columns.size
        self.level_NK = rng.standard_normal((num_samples, size)) @ _factor(covariance.level).T
        self.curve_NK = rng.standard_normal((num_samples, size)) @ _factor(covariance.curve).T
        self.own_NK = rng.standard_normal((num_samples, size))
        self.noise_NK = rng.standard_normal((num_samples, size))
        self.uniform_NK = rng.random((num_samples, size))
        self.evidence: Evidence | None = None
        self.rows: list[int] = []
        self._runs: list[ComponentObservations] = []

    def observe(self, rows: list[int], runs: list[ComponentObservations], log_prior_L: Floats) -> None:
        """Set the measurements. The evidence stays the same object while nothing is new."""
        if runs != self._runs:
            self.rows, self._runs = rows, runs
            self.evidence = Evidence.of(self.covariance.restrict(rows), runs, log_prior_L) if rows else None

    def sample(self, hyperparameters: Hyperparameters, log_prior_K: Floats) -> tuple[Floats, Floats]:
        """Return mean, shape (K,), and samples, shape (N, K), of the logarithm of seconds.

        `log_prior_K` is that of the roofline's.
        """
        mean_K, samples_NK = (log_prior_K + distance for distance in self._distances(hyperparameters))
        if self._shape is not None and self.rows:
            known_K = np.isin(np.arange(self.columns.size), self.rows)
            self._shape.apply(samples_NK, known_K)
            mean_K = np.where(known_K, mean_K, samples_NK.mean(axis=0))
        return mean_K, samples_NK

    def _distances(self, hyperparameters: Hyperparameters) -> tuple[Floats, Floats]:
        """Return mean, shape (K,), and samples, shape (N, K), of the distances from the roofline."""
        own, curve = hyperparameters.own_N[:, None], hyperparameters.amplitude_N[:, None]
        prior_NK = self.level_NK + curve * self.curve_NK + own * self.own_NK
        mean_K = np.zeros(self.columns.size)
        if self.evidence is None:
            return mean_K, prior_NK
        evidence, rows = self.evidence, self.rows
        each_N3 = np.stack([hyperparameters.run_N, hyperparameters.own_N, hyperparameters.amplitude_N], axis=1)
        outlier_NL = self.uniform_NK[:, rows] < evidence.outlier_probability(*np.median(each_N3, axis=0))
        cells, index_N = _distinct(np.hstack([each_N3, outlier_NL]))
        run, own_std, amplitude = cells[:, :3].T
        inverse = np.linalg.inv(evidence.gram(run, own_std, amplitude, cells[:, 3:]))[index_N]
        noise_NL = evidence.noise(hyperparameters.run_N, outlier=outlier_NL)
        imagined_NL = prior_NK[:, rows] + self.noise_NK[:, rows] * np.sqrt(noise_NL)
        level_LK, curve_LK = self.covariance.level[rows], self.covariance.curve[rows]
        weights_NL = inverse @ evidence.distance_L
        mean_K = weights_NL.mean(axis=0) @ level_LK + (curve**2 * weights_NL).mean(axis=0) @ curve_LK
        mean_K[rows] += (own**2 * weights_NL).mean(axis=0)
        residual_NL = evidence.distance_L - imagined_NL
        weights_NL = np.einsum("nij,nj->ni", inverse, residual_NL)
        samples_NK = prior_NK + weights_NL @ level_LK + curve**2 * (weights_NL @ curve_LK)
        samples_NK[:, rows] += own**2 * weights_NL
        return mean_K, samples_NK


def _distinct(rows: Floats) -> tuple[Floats, Ints]:
    """Return the distinct rows, and the index of each row in them. `np.unique(axis=0)` takes several times as long."""
    whole = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]
    _, first, index = np.unique(whole, return_index=True, return_inverse=True)
    return rows[first], index


class Surrogate:
    """Posterior over the components of one model variant. Axes: K components, N samples.

    Attributes:
        log_center_K, log_std_K: mean and standard deviation of the posterior samples of the logarithm of seconds.
        host_std_K: the noise of each component's host seconds.
        essential_K: the components that must be measured, because no other predicts them: optimizer and communication.
        compiled_K: the components whose code the compiler makes.
        overlap: of communication and computation; None if no communication is timed.
    """

    def __init__(
        self, table: Composition, hardware: HardwareSpec, *, num_samples: int, rng: np.random.Generator
    ) -> None:
        model, request = table.model, table.request
        self.components = table.components
        self._host_is_device = hardware.device_kind == "cpu"
        self._num_samples = num_samples
        self._column = {component: i for i, component in enumerate(self.components)}
        predicted = [predict_component_seconds(c, model, request, hardware) for c in self.components]
        self._log_prior_K = np.log([p.device for p in predicted])
        self._host_prior_K = np.array([p.host for p in predicted])
        self.predicted_bytes_3K = predict_component_table(table)
        self._host_normal_NK = np.asfortranarray(
            rng.standard_normal((num_samples, len(self.components)), dtype=np.float32)
        )
        self._kinds: dict[str, _KindPrior] = {}
        for kind in ComponentKind:
            columns = np.array([i for i, c in enumerate(self.components) if c.kind is kind], dtype=np.int64)
            if columns.size:
                of_kind = [self.components[i] for i in columns]
                is_whole = table.candidates[0].is_whole
                covariance = Covariance.of(of_kind, is_whole=is_whole)
                shape = StepShape(of_kind) if is_whole else None
                self._kinds[kind.value] = _KindPrior(columns, covariance, num_samples, rng, shape)
        self._hyperparameter_posterior = HyperparameterPosterior(
            hardware.device_kind, list(self._kinds), num_samples, rng
        )
        self.essential_K = np.array([c.micro_batch_size == 0 for c in self.components])
        self.compiled_K: Mask = np.array([c.is_compiled for c in self.components], dtype=np.bool_)
        self._table = table
        self._own_size = model.micro_batch_size if isinstance(model, ModelParts) else None
        self._observed: dict[Component, ComponentObservations] = {}
        self.fit({})

    def fit(self, observed: Mapping[Component, ComponentObservations]) -> None:
        """Condition on all runs, whatever their order; components of other variants among them are ignored."""
        mine = sorted((self._column[c], c) for c in observed if c in self._column)
        self._observed = {c: observed[c] for _, c in mine}
        self._condition(self._observed)

    def expecting(self, pending: Iterable[Component]) -> Surrogate:
        """Return a copy in which the components in flight were run once more, with their expected figures.

        This is the kriging believer of Ginsbourger et al. (2010). The hyperparameters stay those of the real runs.
        """
        other = copy.copy(self)
        other._kinds = {kind: copy.copy(prior) for kind, prior in self._kinds.items()}
        observed = dict(self._observed)
        for component in pending:
            earlier = observed[component].runs if component in observed else ()
            observed[component] = ComponentObservations((*earlier, self._expected(component)))
        other._condition(observed, self.hyperparameters)
        return other

    def _expected(self, component: Component) -> ComponentMeasurement:
        """Return the expected measurement of a component."""
        column = self._column[component]
        device = float(self.device_mean_K[column])
        overlap = self.overlap if component in self._table.communications else None
        waits = self.host_K[column] == 0.0  # the host is busy as long as the device
        host, once = device if waits else float(self.host_K[column]), None
        if overlap is not None:
            host, once = (float(seconds) for seconds in overlap.host_overhead_2K[:, column])
        saved, forward_peak, backward_peak = (round(float(size)) for size in self.bytes_3K[:, column])
        return ComponentMeasurement(
            component=component,
            device_seconds=device,
            host_seconds=host,
            forward_device_seconds=device * float(self.overlap.forward_share_K[column]) if self.overlap else 0.0,
            standard_error_seconds=0.0,
            repeats=1,
            saved_bytes=saved,
            forward_peak_bytes=forward_peak,
            backward_peak_bytes=backward_peak,
            slowdown=float(overlap.slowdown_K[column]) if overlap is not None else None,
            host_once_seconds=once,
        )

    def _condition(
        self, mine: Mapping[Component, ComponentObservations], fixed: dict[str, Hyperparameters] | None = None
    ) -> None:
        self.known_K: Mask = np.zeros(len(self.components), dtype=np.bool_)
        self.known_K[[self._column[c] for c in mine]] = True
        log_prior_K = self._log_prior_K + self._whole_offset_K(mine)
        for prior in self._kinds.values():
            rows = [i for i, column in enumerate(prior.columns) if self.known_K[column]]
            columns = prior.columns[rows]
            prior.observe(rows, [mine[self.components[i]] for i in columns], log_prior_K[columns])
        self.hyperparameters: dict[str, Hyperparameters] = fixed or self._hyperparameter_posterior.draw(
            {kind: prior.evidence for kind, prior in self._kinds.items() if prior.evidence is not None}
        )
        log_mean_K = np.empty(len(self.components))
        log_NK = np.empty((self._num_samples, len(self.components)))
        for kind, prior in self._kinds.items():
            log_mean_K[prior.columns], log_NK[:, prior.columns] = prior.sample(
                self.hyperparameters[kind], log_prior_K[prior.columns]
            )
        self.device_mean_K = np.exp(log_mean_K)
        self.device_NK = np.exp(log_NK, order="F")
        self.log_center_K: Floats = log_NK.mean(axis=0)
        self.log_std_K: Floats = log_NK.std(axis=0)
        self.host_K, self.host_std_K = np.zeros(len(self.components)), np.zeros(len(self.components))
        if not self._host_is_device:
            self.host_K, self.host_std_K = estimate_host_seconds(
                self.components, self._host_prior_K, self.device_mean_K, mine
            )
        self.host_NK: Floats = self.host_K * np.exp(self.host_std_K * self._host_normal_NK)
        self.bytes_3K, self.bytes_std_K = estimate_bytes(self.components, self.predicted_bytes_3K, mine)
        self.overlap = self._estimate_overlap(mine)
        self.texts = self._varied_texts(mine)

    def _whole_offset_K(self, mine: Mapping[Component, ComponentObservations]) -> Floats:  # noqa: N802 - axes are in names
        """Return what the logarithm of a whole step's roofline is off by, shape (K,).

        It is that of the first run of the training's own size, or else of the smallest that is known. Nobody has
        counted the operations of such a step, and its weights may have another number format than its products.
        """
        steps = {c: runs for c, runs in mine.items() if c.micro_batch_size}
        offset_K = np.zeros(len(self.components))
        if not steps or not self._table.candidates[0].is_whole:
            return offset_K
        first = min(steps, key=lambda c: (c.micro_batch_size != self._own_size, c.micro_batch_size, self._column[c]))
        seconds = max(steps[first].runs[0].device_seconds, SHORTEST_SECONDS)
        offset = np.log(seconds) - self._log_prior_K[self._column[first]]
        return np.where([c.micro_batch_size > 0 for c in self.components], offset, offset_K)

    def _varied_texts(self, mine: Mapping[Component, ComponentObservations]) -> VariedTexts | None:
        """Return the effects of texts of unequal lengths: usual micro-batches, and the first ones of a width."""
        if self._table.request.lengths is None:
            return None
        drawn_BK = np.ones((NUM_DRAWN, len(self.components)))
        for component, observed in mine.items():
            batches = next((run.batches for run in reversed(observed.runs) if run.batches is not None), None)
            if batches is not None and len(batches) > NUM_DRAWN:
                seconds = np.array([max(one.device_seconds, SHORTEST_SECONDS) for one in batches[:NUM_DRAWN]])
                drawn_BK[:, self._column[component]] = seconds / seconds.mean()
        return VariedTexts.of(self._table, drawn_BK, estimate_new_widths(self.components, mine))

    def _estimate_overlap(self, mine: Mapping[Component, ComponentObservations]) -> Overlap | None:
        if not self._table.communications:
            return None
        slowdown_K, host_overhead_2K = np.zeros(len(self.components)), np.zeros((2, len(self.components)))
        for communication in self._table.communications:
            column, runs = self._column[communication], mine.get(communication)
            measured = runs.slowdown if runs is not None else None
            slowdown_K[column] = ASSUMED_SLOWDOWN if measured is None else measured
            host_overhead_2K[:, column] = runs.host_overhead if runs is not None else 0.0
        return Overlap(estimate_forward_shares(self._table, mine), slowdown_K, host_overhead_2K, self._host_is_device)

    def run_std_K(self, quantile: float = 0.5) -> Floats:  # noqa: N802 - axes are in names
        """Return the relative standard deviation between two runs of each component, shape (K,), at a quantile.

        The default is the median, because the tail of a kind that was measured once shows nothing of this device.
        """
        std_K = np.zeros(len(self.components))
        for kind, prior in self._kinds.items():
            std_K[prior.columns] = float(np.quantile(self.hyperparameters[kind].run_N, quantile))
        return std_K

    def step_run_std(self, table: Composition, rows: Ints, quantile: float = 0.5) -> Floats:
        """Return the relative standard deviation between two runs of a micro-step, from its components', shape (A,)."""
        shares, std_K = table.step_shares(self.device_mean_K, rows), self.run_std_K(quantile)
        return np.asarray(np.sqrt((shares**2 * std_K[table.columns_CP[rows]] ** 2).sum(axis=1)))


def _factor(covariance: Floats) -> Floats:
    return np.asarray(np.linalg.cholesky(covariance + JITTER * np.eye(len(covariance))))
