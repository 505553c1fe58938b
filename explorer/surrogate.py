"""What is believed of every component's seconds and bytes, given those that were measured.

Seconds: a Gaussian process over the logarithm of measured / roofline seconds, one for each kind of component. Its
kernel says what components share: the kind's distance from the roofline, the back end's, a smooth dependence on the
number of sequences that a kernel sees at once (the tile, or the micro-batch), what a recomputation mode adds, and a
part of each component's own. Samples of the posterior are drawn by Matheron's rule from prior samples that are drawn
once a job (Wilson et al., 2020, arXiv:2002.09309), so that a refit costs a solve in the number of measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from explorer.components import Component, ComponentKind
from explorer.hardware import HardwareSpec
from explorer.measurements import ComponentMeasurement
from explorer.memory import predict_component_table
from explorer.roofline import predict_component_seconds
from explorer.table import Floats, SpaceTable

KIND_STD = 0.5  # log-space standard deviations of the parts of the kernel
BACKEND_STD = 0.5
BATCH_STD = 0.3
BATCH_LENGTH = 1.5  # octaves over which the efficiency of a kernel changes with the batch it sees
MODE_STD = 0.05
OWN_STD = 0.01
NUGGET = 0.003  # run-to-run difference that a single run's standard error does not show

BYTES_STD_NEAR = 0.03  # relative error of predicted bytes: the same back end and mode was measured,
BYTES_STD_KIND = 0.10  # only the same kind was,
BYTES_STD_PRIOR = 0.25  # nothing alike was


class Surrogate:
    """Posterior over the components of one model variant. Axes: K components, N samples."""

    def __init__(
        self,
        table: SpaceTable,
        hardware: HardwareSpec,
        *,
        num_samples: int,
        rng: np.random.Generator,
    ) -> None:
        model, request = table.model, table.request
        self.components = table.components
        self._host_is_device = hardware.device_kind == "cpu"
        self._column = {component: i for i, component in enumerate(self.components)}
        predicted = [predict_component_seconds(c, model, request, hardware) for c in self.components]
        self._log_prior_K = np.log([p.device for p in predicted])
        self._host_prior_K = np.array([p.host for p in predicted])
        self.predicted_bytes_3K = predict_component_table(table)
        self._kinds = {
            kind: np.array([i for i, c in enumerate(self.components) if c.kind is kind], dtype=np.int64)
            for kind in ComponentKind
        }
        self._kernels: dict[ComponentKind, Floats] = {}
        self._prior_samples_NK = np.zeros((num_samples, len(self.components)))
        for kind, columns in self._kinds.items():
            if columns.size == 0:
                continue
            kernel = _kernel([self.components[i] for i in columns])
            self._kernels[kind] = kernel
            factor = np.linalg.cholesky(kernel + 1e-10 * np.eye(columns.size))
            self._prior_samples_NK[:, columns] = rng.standard_normal((num_samples, columns.size)) @ factor.T
        self._noise_NK = rng.standard_normal((num_samples, len(self.components)))
        self.known_K = np.zeros(len(self.components), dtype=bool)
        self.device_mean_K = np.exp(self._log_prior_K)
        self.device_NK = np.exp(self._log_prior_K + self._prior_samples_NK)
        self.host_K = np.zeros_like(self._host_prior_K) if self._host_is_device else self._host_prior_K.copy()
        self.bytes_3K = self.predicted_bytes_3K.copy()
        self.bytes_std_K = np.full(len(self.components), BYTES_STD_PRIOR)

    def fit(self, measured: Mapping[Component, ComponentMeasurement]) -> None:
        """Condition on `measured`; components of other variants in it are ignored."""
        found = {c: m for c, m in measured.items() if c in self._column}
        self.known_K = np.array([c in found for c in self.components])
        log_mean_K = self._log_prior_K.copy()
        log_NK = self._log_prior_K + self._prior_samples_NK
        for kind, columns in self._kinds.items():
            local = [i for i, column in enumerate(columns) if self.known_K[column]]
            if not local:
                continue
            observed = columns[local]
            results = [found[self.components[i]] for i in observed]
            seconds = np.array([max(r.device_seconds, 1e-9) for r in results])
            errors = np.array([r.standard_error_seconds for r in results]) / seconds
            noise = errors**2 + NUGGET**2
            residual = np.log(seconds) - self._log_prior_K[observed]
            cross = self._kernels[kind][:, local]
            gram = self._kernels[kind][np.ix_(local, local)] + np.diag(noise)
            gain = np.linalg.solve(gram, cross.T).T
            log_mean_K[columns] += gain @ residual
            imagined = self._prior_samples_NK[:, observed] + self._noise_NK[:, observed] * np.sqrt(noise)
            log_NK[:, columns] += (residual - imagined) @ gain.T
        self.device_mean_K = np.exp(log_mean_K)
        self.device_NK = np.exp(log_NK)
        self._fit_host(found)
        self._fit_bytes(found)

    def _fit_host(self, found: Mapping[Component, ComponentMeasurement]) -> None:
        """Host time depends on what is launched, not on sizes: scale the prior by what the nearest kin showed."""
        self.host_K = self._host_prior_K.copy()
        near, kind = _mean_ratios(
            {c: np.array([max(m.host_seconds, 1e-9) / self._host_prior_K[self._column[c]]]) for c, m in found.items()}
        )
        for i, component in enumerate(self.components):
            if component in found:
                self.host_K[i] = found[component].host_seconds
            elif _kin(component) in near:
                self.host_K[i] *= near[_kin(component)][0]
            elif component.kind in kind:
                self.host_K[i] *= kind[component.kind][0]
        # A block that waits for the device, or runs on the host itself, has one time: the device's.
        waits = np.array([c in found and found[c].host_seconds == found[c].device_seconds for c in self.components])
        if self._host_is_device:
            waits[:] = True
        self.host_K = np.where(
            waits, 0.0, np.where(self.known_K, self.host_K, np.minimum(self.host_K, self.device_mean_K))
        )

    def _fit_bytes(self, found: Mapping[Component, ComponentMeasurement]) -> None:
        measured = {
            c: np.array([m.saved_bytes, m.forward_peak_bytes, m.backward_peak_bytes], dtype=np.float64)
            for c, m in found.items()
        }
        near, kind = _mean_ratios(
            {
                c: np.maximum(b, 1.0) / np.maximum(self.predicted_bytes_3K[:, self._column[c]], 1.0)
                for c, b in measured.items()
            }
        )
        self.bytes_3K = self.predicted_bytes_3K.copy()
        self.bytes_std_K = np.full(len(self.components), BYTES_STD_PRIOR)
        for i, component in enumerate(self.components):
            if component in measured:
                self.bytes_3K[:, i] = measured[component]
                self.bytes_std_K[i] = 0.0
            elif _kin(component) in near:
                self.bytes_3K[:, i] *= near[_kin(component)]
                self.bytes_std_K[i] = BYTES_STD_NEAR
            elif component.kind in kind:
                self.bytes_3K[:, i] *= np.clip(kind[component.kind], 0.5, 2.0)
                self.bytes_std_K[i] = BYTES_STD_KIND


def _kin(component: Component) -> tuple[object, ...]:
    return (component.kind, component.backend, component.recompute, component.bta_tile is not None)


def _mean_ratios(
    ratios: Mapping[Component, Floats],
) -> tuple[dict[tuple[object, ...], Floats], dict[ComponentKind, Floats]]:
    """Geometric means of `ratios` over kin and over kinds."""
    near: dict[tuple[object, ...], list[Floats]] = {}
    kind: dict[ComponentKind, list[Floats]] = {}
    for component, ratio in ratios.items():
        near.setdefault(_kin(component), []).append(np.log(ratio))
        kind.setdefault(component.kind, []).append(np.log(ratio))
    return (
        {key: np.exp(np.mean(logs, axis=0)) for key, logs in near.items()},
        {key: np.exp(np.mean(logs, axis=0)) for key, logs in kind.items()},
    )


def _kernel(components: Sequence[Component]) -> Floats:
    def equal(values: Sequence[object]) -> Floats:
        codes = np.unique([str(v) for v in values], return_inverse=True)[1]
        return np.asarray(codes[:, None] == codes[None, :], dtype=np.float64)

    def smooth(values: Sequence[int]) -> Floats:
        octaves = np.log2(np.maximum(values, 1))
        return np.asarray(np.exp(-0.5 * ((octaves[:, None] - octaves[None, :]) / BATCH_LENGTH) ** 2))

    backend = equal([c.backend for c in components])
    mode = equal([(c.recompute, c.bta_tile is not None) for c in components])
    seen_at_once = smooth([c.bta_tile or c.micro_batch_size for c in components])
    micro_batch = smooth([c.micro_batch_size for c in components])
    kernel = KIND_STD**2 + backend * (
        BACKEND_STD**2 + BATCH_STD**2 * seen_at_once + MODE_STD**2 * mode * 0.5 * (1.0 + seen_at_once * micro_batch)
    )
    return np.asarray(kernel + OWN_STD**2 * np.eye(len(components)))
