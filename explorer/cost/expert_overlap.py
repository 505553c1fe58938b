"""What exchanges of an expert-parallel layer add to its computation.

A device has two resources: one computes, the other exchanges, each in the order that `bexp.kernels.expert_parallel`
gives it. Forward sends all chunks, then broadcasts the shadowed experts' weights, then returns each chunk as soon as it
is computed; the shadowed experts are computed last. Backward is the reverse, with the gradients' sum in place of the
broadcast. Whatever is computed beside an exchange is slower, because the exchange takes multiprocessors and memory
bandwidth.

The computation is also measured on each device alone, which plays the others: each exchange is a copy of as many bytes
on the device itself. An exchange contains that copy, so that it is taken off the computation.

Before it sends rows, forward exchanges how many there are, and the host waits for these counts. The device then stands
still until the host has issued the exchanges of the rows and the first of the experts' kernels.

Once the devices have run the block together, its seconds have all of this, and replace it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bexp.explorer.cost.collectives import ASSUMED_SLOWDOWN
from bexp.explorer.cost.transfers import Transfer

NOTHING = Transfer(0.0)
Task = tuple[float, int | None]
"""Seconds, and the place of the other resource's task that must end before; None if there is none."""


@dataclass(frozen=True, slots=True)
class ExpertOverlap:
    """The exchanges of a layer's experts for one micro-batch, one way.

    `moved` is one of `degree` chunks of rows, and `paired` the routing weights of its pairs of token and expert.
    The weights of the shadowed experts, or the sums of their gradients, pass in `num_copies` exchanges like `copied`.
    The shadowed experts take `home_share` of the computation. `local_bytes` are those that the measured device reads
    and writes in one direction in place of exchanges of rows.
    """

    degree: int
    moved: Transfer
    copied: Transfer
    home_share: float
    paired: Transfer = NOTHING
    num_copies: int = 1
    local_bytes: int = 0

    @property
    def issued_seconds(self) -> tuple[float, float]:
        """Return the seconds in which the host issues the exchanges of forward, and those of backward.

        Forward exchanges counts, and of each chunk rows, weights and routes, and what returns. Backward exchanges the
        gradients of rows and weights, and of what returned.
        """
        once, copied = self.moved.host_seconds, self.num_copies * self.copied.host_seconds
        return (1 + 4 * self.degree) * once + copied, 3 * self.degree * once + copied

    def forward_seconds(self, computation: float) -> float:
        """Return the seconds of forward, whose experts compute for `computation` seconds by themselves.

        The device stands still after the host's wait, while the host issues exchanges. The first chunk arrives
        meanwhile.
        """
        started = 3 * self.degree * self.moved.host_seconds + self.num_copies * self.copied.host_seconds
        hidden = max(0.0, started - self._moved)
        return self.paired.seconds + hidden + self._forward_seconds(computation)

    @property
    def _copied(self) -> float:
        return self.num_copies * self.copied.seconds

    @property
    def _moved(self) -> float:
        """Rows with their routing weights, or with their routes, which are as short."""
        return self.moved.seconds + self.paired.seconds

    def _forward_seconds(self, computation: float) -> float:
        chunks, home, moved = range(self.degree), self._home(computation), self._moved
        computed: list[Task] = [(self._chunk(computation), chunk) for chunk in chunks]
        moves: list[Task] = [(moved, None) for _ in chunks]
        if home:
            computed.append((home, self.degree))
            moves.append((self._copied, None))
        moves += [(moved, chunk) for chunk in chunks]
        return run_beside(computed, moves)

    def backward_seconds(self, computation: float) -> float:
        """Return the seconds of backward, in which the host waits for nothing."""
        chunks, home, moved = range(self.degree), self._home(computation), self._moved
        computed: list[Task] = [(self._chunk(computation), chunk) for chunk in chunks]
        moves: list[Task] = [(moved, None) for _ in chunks]
        first = 0
        if home:
            computed.insert(0, (home, None))
            moves.append((self._copied, 0))
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
