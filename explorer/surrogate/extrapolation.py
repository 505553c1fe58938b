"""Host seconds, bytes and forward shares of components that were not measured, from similar ones that were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bexp.explorer.cost.collectives import FORWARD_SHARES
from bexp.explorer.cost.components import Component, ComponentKind
from bexp.explorer.cost.composition import Composition, Floats
from bexp.explorer.surrogate.observations import SHORTEST_SECONDS, ComponentObservations

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
