"""A legal space as arrays, which compose the seconds and bytes of every candidate from those of components."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bexp.explorer.cost.activation_memory import predict_component_bytes
from bexp.explorer.cost.collectives import Overlap, ShardingCommunication
from bexp.explorer.cost.components import Component
from bexp.explorer.cost.decomposition import Decomposer, Decomposition
from bexp.explorer.cost.request_texts import text_batches, tokens_per_sequence, widest
from bexp.explorer.cost.step import FRAGMENTATION, MARGIN_BYTES, MemoryParts, gathered_bytes, static_parts
from bexp.explorer.dimensions.candidate import Candidate
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.model.hardware import HardwareSpec
from bexp.explorer.model.parts import ExploredModel
from bexp.explorer.request.request import ExplorationRequest

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Composition:
    """Candidates as rows, components as columns of a lookup.

    Axes in names: C candidates, K components, P components of one candidate, N samples.

    Attributes:
        components: the distinct components of all candidates; every array over K is in this order.
        columns_CP: the columns of each candidate's components, where `used_CP` is set.
        static_bytes_C: the training state of each candidate.

    With `communicates`, every step contains the exchange of gradients and parameters with its level of sharding.
    `decompositions` are those of the candidates, in order, if another table has made them.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        model: ExploredModel,
        request: ExplorationRequest,
        *,
        communicates: bool = False,
        decompositions: Iterable[Decomposition] | None = None,
    ) -> None:
        self.candidates = tuple(candidates)
        self.model = model
        self.request = request
        self.training = request.mode == "train"
        if decompositions is None:
            decompose = Decomposer(model, training=self.training, communicates=communicates)
            decompositions = map(decompose, self.candidates)
        self.decompositions: tuple[Decomposition, ...] = tuple(decompositions)
        self.row = {candidate: i for i, candidate in enumerate(self.candidates)}
        self.column: dict[Component, int] = {}
        # A decomposer shares equal components. Most are known by identity, which is faster than a hash of their values.
        place: dict[int, int] = {}
        steps: list[list[int]] = []
        for decomposition in self.decompositions:
            for component in decomposition.step:
                if id(component) not in place:
                    place[id(component)] = self.column.setdefault(component, len(self.column))
            steps.append([place[id(component)] for component in decomposition.step])
        self.components = tuple(self.column)
        communications = [d.communication for d in self.decompositions if d.communication is not None]
        self.communications: tuple[Component, ...] = tuple(dict.fromkeys(communications))
        self._communication_C = np.array([place[id(communication)] for communication in communications])

        num_groups = max(len(d.layers) for d in self.decompositions)
        shape = (len(self.candidates), num_groups)
        nothing = len(self.components)  # the column of zeros that `_padded` adds
        self._embedding_C = np.array(
            [nothing if d.embedding is None else place[id(d.embedding)] for d in self.decompositions]
        )
        self._head_C = np.array([place[id(d.head)] for d in self.decompositions])
        self._optimizer_C = np.array([place[id(d.optimizer)] if d.optimizer else 0 for d in self.decompositions])
        self._first_CG = np.full(shape, nothing, dtype=np.int64)
        self._second_CG = np.full(shape, nothing, dtype=np.int64)
        self._count_CG = np.zeros(shape, dtype=np.int64)
        self._kept_CG = np.zeros(shape, dtype=np.int64)
        self._recomputed_CG = np.zeros(shape, dtype=bool)
        self._below_CGG = np.zeros((*shape, num_groups), dtype=np.int64)
        self._together_CGG = np.zeros((*shape, num_groups), dtype=np.int64)
        for i, decomposition in enumerate(self.decompositions):
            for j, group in enumerate(decomposition.layers):
                first, *second = (place[id(block)] for block in group.blocks)
                self._first_CG[i, j] = first
                self._second_CG[i, j] = second[0] if second else nothing
                equal = group.layers
                self._count_CG[i, j] = equal.count
                self._kept_CG[i, j] = equal.kept
                self._recomputed_CG[i, j] = equal.recomputed
                self._below_CGG[i, j, : len(equal.below)] = equal.below
                self._together_CGG[i, j, : len(equal.together)] = equal.together
        self.micro_batch_C = np.array([c.micro_batch_size for c in self.candidates])
        self.sharing_C = np.array([c.context_parallel_size for c in self.candidates])
        self._replayed_C: Mask = np.array([request.execution_of(c).replays for c in self.candidates])
        self._on_host_C: Mask = np.array([c.recompute is Recompute.OFFLOAD for c in self.candidates])
        self._in_chunks_C = np.array([c.recompute.group_size is not None for c in self.candidates])
        self._list_components(steps)
        self._list_shardings()
        tokens_C = self.micro_batch_C * (widest(model, request) // self.sharing_C)
        self._output_C = tokens_C * model.output_bytes_per_token

    def _list_components(self, steps: list[list[int]]) -> None:
        """Set the distinct components of each candidate, and the number of their runs in a micro-step.

        `steps` has the columns of each candidate's components in the order of a step.
        """
        distinct = [list(dict.fromkeys(columns)) for columns in steps]
        number_C = np.array([len(columns) for columns in distinct])
        self.used_CP: Mask = np.arange(number_C.max()) < number_C[:, None]
        self.columns_CP: Ints = np.zeros(self.used_CP.shape, dtype=np.int64)
        self.columns_CP[self.used_CP] = np.concatenate(distinct)
        self.uses_CK: Mask = np.zeros((len(self.candidates), len(self.components)), dtype=bool)
        self.uses_CK[np.repeat(np.arange(len(distinct)), number_C), self.columns_CP[self.used_CP]] = True
        runs_CP = (self.columns_CP == self._embedding_C[:, None]).astype(np.float64)
        runs_CP += self.columns_CP == self._head_C[:, None]
        for g in range(self._count_CG.shape[1]):
            for block_C in (self._first_CG[:, g], self._second_CG[:, g]):
                runs_CP += self._count_CG[:, [g]] * (self.columns_CP == block_C[:, None])
        self._runs_CP: Floats = np.where(self.used_CP, runs_CP, 0.0)

    def _list_shardings(self) -> None:
        """Set the levels of sharding, with the exchanges and the memory of each."""
        levels = dict.fromkeys(c.sharding for c in self.candidates)
        place = {level: i for i, level in enumerate(levels)}
        self._level_C = np.array([place[c.sharding] for c in self.candidates])
        requests = [self.request.sharded(level) for level in levels]
        self._communications_by_level = [ShardingCommunication.of(self.model, request) for request in requests]
        self._static = [static_parts(self.model, request) for request in requests]
        self.static_bytes_C: Ints = np.array([parts.total for parts in self._static])[self._level_C]
        gathered = [gathered_bytes(self.model, request) for request in requests]
        self._gathered_head_C = np.array([each.at_head for each in gathered])[self._level_C]
        self._gathered_layer_C = np.array([each.at_layer for each in gathered])[self._level_C]
        self._after_layer_C = np.array([each.after_layer for each in gathered])[self._level_C]

    def static_parts(self, row: int) -> MemoryParts:
        """Return the training state of a candidate."""
        return self._static[int(self._level_C[row])]

    def step_shares(self, seconds_K: Floats, rows: Ints) -> Floats:
        """Return the share of a micro-step that each of a candidate's components takes, shape (rows, P).

        The components are those of `columns_CP`, where `used_CP` is set. The share of the optimizer is 0.
        """
        seconds = self._runs_CP[rows] * seconds_K[self.columns_CP[rows]]
        return np.asarray(seconds / seconds.sum(axis=1, keepdims=True))

    def micro_step_seconds(
        self, device_NK: Floats, host_K: Floats, rows: Ints | slice = slice(None), texts: VariedTexts | None = None
    ) -> Floats:
        """Return the seconds of a forward and backward pass over the whole model, shape (N, C).

        The host issues work up to about a thousand launches ahead of the device. It gains that lead during blocks that
        keep the device busy for long, above all the head. So the pass takes the larger of its device and host seconds.
        For texts of unequal length that holds for each micro-batch. A pass that is replayed as CUDA graphs takes two
        launches, which the host issues while the device still works on the pass before. So it takes its device seconds.
        """
        device_NC = self._sum_blocks(device_NK, rows)
        host_NC = np.where(self._replayed_C[rows], 0.0, self._sum_blocks(np.atleast_2d(host_K), rows))
        if texts is None:
            return np.maximum(device_NC, host_NC)
        each_BNC = [self._sum_blocks(device_NK * share_K, rows) for share_K in texts.drawn_BK]
        longer_NC = sum(np.maximum(one_NC, host_NC) for one_NC in each_BNC)
        return np.asarray(device_NC * longer_NC / sum(each_BNC)) + texts.new_width_C[rows]

    def _sum_blocks(self, values_NK: Floats, rows: Ints | slice) -> Floats:
        """Return the sum of values over the blocks of a whole model, shape (N, C)."""
        values_NK = self._padded(values_NK)
        total = values_NK[:, self._embedding_C[rows]] + values_NK[:, self._head_C[rows]]
        for g in range(self._count_CG.shape[1]):
            first, second, count = self._first_CG[rows, g], self._second_CG[rows, g], self._count_CG[rows, g]
            total += count * (values_NK[:, first] + values_NK[:, second])
        return np.asarray(total)

    def _padded(self, values: Floats) -> Floats:
        """Return the values of the components and a zero for the blocks that a decomposition does not have."""
        if values.shape[-1] > len(self.components):
            return values
        return np.concatenate([values, np.zeros((*values.shape[:-1], 1))], axis=-1)

    def optimizer_seconds(self, device_NK: Floats, host_K: Floats, rows: Ints | slice = slice(None)) -> Floats:
        """Return the seconds of one device's optimizer step, shape (N, C)."""
        columns = self._optimizer_C[rows]
        if not self.training:
            return np.zeros((device_NK.shape[0], len(columns)), dtype=np.float64)
        return np.asarray(np.maximum(device_NK[:, columns], np.atleast_2d(host_K)[:, columns]))

    def communication_seconds(
        self,
        device_NK: Floats,
        host_K: Floats,
        micro_step_NC: Floats,
        overlap: Overlap | None,
        rows: Ints | slice = slice(None),
    ) -> Floats:
        """Return the seconds that the exchange of gradients and parameters adds to a whole step, shape (N, C).

        They are 0 if the exchange is not timed; otherwise `overlap` is needed. `micro_step_NC` are the seconds of the
        rows' micro-steps without the exchange. The host's work for the exchange adds seconds only if the device waits
        for the host.
        """
        if not self.communications:
            return np.zeros_like(micro_step_NC)
        assert overlap is not None, "traffic passes during computation"
        blocks_NC = self._sum_blocks(device_NK, rows)
        forward_NC = micro_step_NC * self._sum_blocks(device_NK * overlap.forward_share_K, rows) / blocks_NC
        # A block that waits for the device has no host seconds of its own: the host is busy for as long as the device.
        issued_NC = self._sum_blocks(np.where(host_K > 0, host_K, device_NK), rows)
        num_micro_steps_C = self.request.devices.batch_share * self.sharing_C[rows] / self.micro_batch_C[rows]
        column_C, level_C = self._communication_C[rows], self._level_C[rows]
        found_NC = np.empty_like(micro_step_NC)
        for level, communication in enumerate(self._communications_by_level):
            at = level_C == level
            if not at.any():
                continue
            column = int(column_C[at][0])
            traffic_N1, gathered = device_NK[:, [column]], float(overlap.forward_share_K[column])
            plain_NC = micro_step_NC[:, at]
            always_NC, once_NC = communication.visible_seconds(
                gathered * traffic_N1,
                (1.0 - gathered) * traffic_N1,
                forward_NC[:, at],
                plain_NC - forward_NC[:, at],
                float(overlap.slowdown_K[column]),
            )
            each, once = (float(seconds) for seconds in overlap.host_overhead_2K[:, column])
            if overlap.computes:
                always_NC, once_NC = always_NC + each, once_NC + once
            else:
                handled_NC = np.maximum(plain_NC + always_NC, issued_NC[:, at] + each)
                last_NC = np.maximum(handled_NC + once_NC, issued_NC[:, at] + each + once)
                always_NC, once_NC = handled_NC - plain_NC, last_NC - handled_NC
            found_NC[:, at] = num_micro_steps_C[at] * always_NC + once_NC
        return found_NC

    def tokens_per_second(
        self,
        device_NK: Floats,
        host_K: Floats,
        rows: Ints | slice = slice(None),
        overlap: Overlap | None = None,
        texts: VariedTexts | None = None,
    ) -> Floats:
        """Return the tokens/s of one device over a whole step, shape (N, C).

        A step is (B c / (N m)) micro-steps, the optimizer and the communication. The c devices that share sequences
        also share their tokens, see `bexp.explorer.cost.step.StepSeconds`.
        """
        micro_batch, sharing = self.micro_batch_C[rows], self.sharing_C[rows]
        share = self.request.devices.batch_share * sharing if self.training else micro_batch
        micro_step = self.micro_step_seconds(device_NK, host_K, rows, texts)
        step = share / micro_batch * micro_step
        step += self.optimizer_seconds(device_NK, host_K, rows)
        if self.communications:
            step += self.communication_seconds(device_NK, host_K, micro_step, overlap, rows)
        return np.asarray(share * tokens_per_sequence(self.model, self.request) / sharing / step)

    def activation_bytes(
        self, saved_K: Floats, forward_peak_K: Floats, backward_peak_K: Floats, *, share_of_longest: float = 1.0
    ) -> tuple[Floats, Floats]:
        """Return the saved and the transient bytes at the peak of a step, each of shape (C,).

        Gradients exist before the step, as they do in every step but the first. A recomputed layer keeps only its
        output. In its backward pass all of its tensors are alive again, with those of the layers that run again
        together with it. The incoming gradient of a block is added here, because a block's own figures count from the
        level at which that gradient exists. With texts of unequal lengths, the bytes are those of a micro-batch with a
        `share_of_longest` of the tokens of the longest.
        """
        output_C = share_of_longest * self._output_C
        saved_K, forward_peak_K, backward_peak_K = map(self._padded, (saved_K, forward_peak_K, backward_peak_K))
        head, embedding = self._head_C, self._embedding_C
        first_CG, second_CG = self._first_CG, self._second_CG
        if not self.training:
            highest = np.maximum(forward_peak_K[head], forward_peak_K[embedding])
            for g in range(self._count_CG.shape[1]):
                # While the second block runs, the layer's input is still held, and the first block's output.
                in_second = forward_peak_K[second_CG[:, g]] + output_C
                block = np.maximum(forward_peak_K[first_CG[:, g]], in_second)
                highest = np.maximum(highest, np.where(self._count_CG[:, g] > 0, block, 0))
            return np.zeros(len(highest)), np.asarray(highest + output_C)
        # A shell, which is measured as one component, counts the embedding's output with the head.
        embedded = np.where(embedding < len(self.components), saved_K[embedding], output_C)
        at_head = np.where(embedding < len(self.components), saved_K[embedding], 0.0)
        inside_CG = saved_K[first_CG] + saved_K[second_CG]
        held_CG = np.where(self._recomputed_CG, output_C[:, None], inside_CG)
        # A layer's output goes to the host with what the next layer keeps; that of the last layer stays for the head.
        held_CG -= np.where(self._on_host_C[:, None], np.minimum(output_C[:, None], held_CG), 0.0)
        layers = (self._kept_CG * held_CG).sum(axis=1) + np.where(self._on_host_C, output_C, 0.0)
        saved = at_head + layers
        peak: Floats = saved + self._head_bytes(forward_peak_K, backward_peak_K)
        for g in range(self._count_CG.shape[1]):
            first, second = first_CG[:, g], second_CG[:, g]
            forward = np.maximum(forward_peak_K[first], saved_K[first] + forward_peak_K[second])
            forward += np.where(self._in_chunks_C, output_C, 0)  # runs again while the chunk's gradient is held
            backward = output_C + np.maximum(saved_K[first] + backward_peak_K[second], backward_peak_K[first])
            below = embedded + (self._below_CGG[:, g] * held_CG).sum(axis=1)
            below += (self._together_CGG[:, g] * inside_CG).sum(axis=1)
            # Its last buffer begins when it has freed all but the gradient that goes on to the layer below.
            running = np.maximum(forward, backward) - self._after_layer_C
            at_layer = below + np.maximum(running, output_C) + self._gathered_layer_C
            peak = np.maximum(peak, np.where(self._count_CG[:, g] > 0, at_layer, 0))
        over = peak - saved
        step = np.maximum(forward_peak_K, backward_peak_K)[self._optimizer_C]
        # The memory of graphs serves nothing else, so the optimizer's buffers need memory in addition to activations.
        over += np.where(self._replayed_C, step, 0.0)
        decides = step > saved + over
        return np.where(decides, 0.0, saved), np.where(decides, step, over)

    def is_head_at_peak(self, row: int, transient: float, forward_peak_K: Floats, backward_peak_K: Floats) -> bool:
        """Return whether a candidate's peak is where its head runs; `transient` are its bytes of `activation_bytes`."""
        at_head = self._head_bytes(forward_peak_K, backward_peak_K)[row]
        if not self.training:
            at_head += self._output_C[row]
        elif self._replayed_C[row]:
            at_head += np.maximum(forward_peak_K, backward_peak_K)[self._optimizer_C[row]]
        return bool(transient <= at_head + 1.0)

    def _head_bytes(self, forward_peak_K: Floats, backward_peak_K: Floats) -> Floats:
        """Return the bytes that are alive while the head runs, without those that the layers keep, shape (C,)."""
        return np.asarray(np.maximum(forward_peak_K, backward_peak_K)[self._head_C] + self._gathered_head_C)

    def missing(self, row: int, known_K: Mask) -> tuple[Component, ...]:
        """Return the components of a candidate that are not known yet, in the order of a step."""
        return tuple(c for c in self.decompositions[row].components if not known_K[self.column[c]])


def predict_component_table(table: Composition) -> Floats:
    """Return the predicted saved, forward-peak and backward-peak bytes of the table's components, shape (3, K)."""
    sizes = [predict_component_bytes(c, table.model, table.request) for c in table.components]
    return np.array([[getattr(s, name) for s in sizes] for name in ("saved", "forward_peak", "backward_peak")], float)


def predict_memory(table: Composition, hardware: HardwareSpec, *, activation_share: float = 1.0) -> Floats:
    """Return the bytes that every candidate requires, shape (C,): reserved, context and margin.

    `activation_share` scales the activations. A share below 1 shows what would fit if the prediction were too high.
    """
    saved, transient = table.activation_bytes(*predict_component_table(table))
    return required_table(table, activation_share * (saved + transient), hardware)


def required_table(
    table: Composition, activations: Floats, hardware: HardwareSpec, rows: Ints | slice = slice(None)
) -> Floats:
    """Return the bytes that candidates require with these activations at the peak; the last axis is the rows."""
    peak = table.static_bytes_C[rows] + activations
    reserved = peak * (1 + FRAGMENTATION[table.request.allocator])
    return np.asarray(reserved + hardware.context_bytes + MARGIN_BYTES[hardware.device_kind])


@dataclass(frozen=True, slots=True)
class VariedTexts:
    """Axes: B usual micro-batches, C candidates, K components.

    `drawn_BK` are the device seconds of usual micro-batches, as shares of their mean. `new_width_C` are the seconds
    that the first micro-batches of a width add to a micro-batch in the mean over an epoch.
    """

    drawn_BK: Floats  # noqa: N815 - axes are in names
    new_width_C: Floats  # noqa: N815 - axes are in names

    @classmethod
    def of(cls, table: Composition, drawn_BK: Floats, new_width_K: Floats) -> VariedTexts:
        """Return the effects, given the additional seconds of a component when a process first runs rows of a width.

        These occur once for all layers of a kind, however they are recomputed.
        """
        batches = {int(size): text_batches(table.request, int(size)) for size in np.unique(table.micro_batch_C)}
        share = {size: 0.0 if texts is None else texts.new_width_share for size, texts in batches.items()}
        found_C = np.zeros(len(table.candidates))
        for part in {component.part for component in table.components}:
            of_part_K = np.array([component.part == part for component in table.components])
            found_C += (table.uses_CK * np.where(of_part_K, new_width_K, 0.0)).max(axis=1)
        return cls(drawn_BK, found_C * np.array([share[int(size)] for size in table.micro_batch_C]))
