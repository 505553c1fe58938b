"""What exchanges of an expert-parallel layer add to its computation if the two run beside each other.

A device has two resources: one computes, the other exchanges, each in the order that `bexp.kernels.expert_parallel`
gives it. Forward sends all chunks, then broadcasts the shadowed experts' weights, then returns each chunk as soon as it
is computed; the shadowed experts are computed last. Backward is the reverse, with the gradients' sum in place of the
broadcast. Whatever is computed beside an exchange is slower, because the exchange takes multiprocessors and memory
bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from explorer.cost_model.collectives import ASSUMED_SLOWDOWN
from explorer.cost_model.fabric_exchange import Link, Transfer

Task = tuple[float, int | None]
"""Seconds, and the place of the other resource's task that must end before; null if there is none."""


@dataclass(frozen=True, slots=True)
class ExpertOverlap:
    """The exchanges of a layer's experts for one micro-batch, one way.

    `moved` is one of `degree` chunks of rows, `copied` the weights of the shadowed experts or the sum of their
    gradients. The shadowed experts take `home_share` of the computation.
    """

    degree: int
    moved: Transfer
    copied: Transfer
    home_share: float

    @property
    def link(self) -> Link:
        """The link that most of the seconds pass."""
        return self.copied.link if self.copied.seconds > 2 * self.degree * self.moved.seconds else self.moved.link

    @property
    def host_seconds(self) -> float:
        """Return the seconds in which the host issues the exchanges of one way."""
        copied = self.copied.host_seconds if self.home_share else 0.0
        return 2 * self.degree * self.moved.host_seconds + copied

    def forward_seconds(self, computation: float) -> float:
        """Return the seconds of forward, whose experts compute for `computation` seconds by themselves."""
        chunks, home, moved = range(self.degree), self._home(computation), self.moved.seconds
        computed: list[Task] = [(self._chunk(computation), chunk) for chunk in chunks]
        moves: list[Task] = [(moved, None) for _ in chunks]
        if home:
            computed.append((home, self.degree))
            moves.append((self.copied.seconds, None))
        moves += [(moved, chunk) for chunk in chunks]
        return run_beside(computed, moves)

    def backward_seconds(self, computation: float) -> float:
        """Return the seconds of backward, as for forward."""
        chunks, home, moved = range(self.degree), self._home(computation), self.moved.seconds
        computed: list[Task] = [(self._chunk(computation), chunk) for chunk in chunks]
        moves: list[Task] = [(moved, None) for _ in chunks]
        first = 0
        if home:
            computed.insert(0, (home, None))
            moves.append((self.copied.seconds, 0))
            first = 1
        moves += [(moved, first + chunk) for chunk in chunks]
        return run_beside(computed, moves)

    def _home(self, computation: float) -> float:
        return self.home_share * computation

    def _chunk(self, computation: float) -> float:
        return (1.0 - self.home_share) * computation / self.degree


def run_beside(computed: Sequence[Task], moved: Sequence[Task], slowdown: float = ASSUMED_SLOWDOWN) -> float:
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
