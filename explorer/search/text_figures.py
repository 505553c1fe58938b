"""What texts of unequal length mean for a candidate: padding, and the peaks of an epoch's micro-batches."""

from __future__ import annotations

from bexp.explorer.cost.request_texts import text_batches, tokens_per_sequence
from bexp.explorer.cost.text_batches import TextBatches
from bexp.explorer.records.recommendation import TextFigures
from bexp.explorer.search.posterior import Posterior


def text_figures(posterior: Posterior, row: int) -> TextFigures | None:
    """Return the figures of a candidate; None if every sequence is full."""
    request, table = posterior.request, posterior.table
    size = table.candidates[row].micro_batch_size
    batches, batching = text_batches(request, size), request.batching_of_texts
    if batches is None or batching is None or request.lengths is None:
        return None
    texts, tokens = request.lengths.cut(request.seq_length), tokens_per_sequence(table.model, request)
    expected, high = batches.peaks(_peaks(posterior, row, batches))
    whole = posterior.memory.whole_peak(row)
    factor = 1.0 if whole is None else whole / posterior.bytes(row).peak
    return TextFigures(
        batching=batching,
        num_texts=round(texts.num_texts),
        num_cut=round(texts.num_cut),
        counted=texts.is_counted,
        budget_tokens=size * request.seq_length if batching == "token_budget" else None,
        tokens_per_sequence=tokens,
        padding_share=max(0.0, 1.0 - size * tokens / batches.expected_positions),
        expected_peak_bytes=round(factor * expected),
        high_peak_bytes=round(factor * high),
        out_of_memory_probability=1.0 - posterior.memory.probability_fits(row),
    )


def new_width_note(posterior: Posterior, row: int) -> list[str]:
    """Return a note on what the first micro-batches of each width take, if that is more than the tolerance."""
    size, texts = posterior.table.candidates[row].micro_batch_size, posterior.surrogate.texts
    batches = text_batches(posterior.request, size)
    if texts is None or batches is None or not batches.new_width_share:
        return []
    added, micro_step = float(texts.new_width_C[row]), posterior.seconds(row).micro_step
    if added <= posterior.request.tolerance * micro_step:
        return []
    return [
        f"the first micro-batch of each width takes {added / batches.new_width_share:.2f} s longer, because attention "
        f"plans its kernels for it: {added / micro_step:.0%} of an epoch, and of a short run more. A collator with "
        "pad_to_multiple_of=64 makes few widths: to measure that, state lengths that are rounded up to it"
    ]


def _peaks(posterior: Posterior, row: int, batches: TextBatches) -> list[int]:
    """Return the composed peak of each of the micro-batches that are measured of a size."""
    table, longest = posterior.table, batches.longest.positions
    own = table.columns_CP[row][table.used_CP[row]]
    static, found = int(table.static_bytes_C[row]), []
    for place, batch in enumerate(batches.measured):
        bytes_3K = posterior.surrogate.bytes_3K.copy()
        for column in own:
            component = table.components[column]
            if not component.micro_batch_size:
                continue
            observed = posterior.knowledge.log.runs.get(component)
            figures = None if observed is None else observed.runs[-1].batches
            if figures is None or len(figures) != len(batches.measured):
                bytes_3K[:, column] *= batch.positions / longest  # it was not measured at this length
                continue
            one = figures[place]
            bytes_3K[:, column] = one.saved_bytes, one.forward_peak_bytes, one.backward_peak_bytes
        saved_C, over_C = table.activation_bytes(*bytes_3K, share_of_longest=batch.positions / longest)
        found.append(static + round(float(saved_C[row] + over_C[row])))
    return found
