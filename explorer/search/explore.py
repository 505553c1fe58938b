"""An exploration from request to answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence

from bexp.explorer.cost_model.parameters import count_parameters
from bexp.explorer.cost_model.step import memory_limit
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import Progress
from bexp.explorer.records.recommendation import Answer, VariantAnswer
from bexp.explorer.records.trial import Measure, Trial
from bexp.explorer.search.event_messages import end_event
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.legal_space import EmptySpaceError, explored_models
from bexp.explorer.search.plan_search import explore_plan
from bexp.explorer.search.progress_log import ProgressLog
from bexp.explorer.search.pruned_space import PruneSpace, prune_space
from bexp.explorer.search.relaxations import SmallestCandidate, explain_nothing_fits, find_relaxations
from bexp.explorer.search.trial_executor import executor_of
from bexp.explorer.search.variant_context import VariantContext
from bexp.explorer.search.variant_search import VariantSearch
from bexp.explorer.spec.request import ExplorationRequest


def explore(
    request: ExplorationRequest,
    report: DeviceReport,
    measure: Measure,
    *,
    history: Sequence[Trial] = (),
    clock: Callable[[], float] = time.perf_counter,
    prune: PruneSpace = prune_space,
) -> Iterator[Progress]:
    """Run a request on a device and yield the results step by step. The last step has the answer.

    Each `Progress` must be stored before the next is asked for.

    Args:
        request: what may vary.
        report: the device and its back ends.
        measure: runs one trial; failures are outcomes, never exceptions. A `TrialExecutor` may run several at once:
            what is suggested then depends on the order in which they end, and on nothing else beside the seed.
        history: trials that an earlier run of the same request stored. Nothing in them is measured again, and the
            search goes on as it would have gone. What was in flight when that run ended is measured again.
        clock: seconds that trials and suggestions are charged by; a recorded device brings its own.
        prune: enumerates a variant's space; a caller who explores one space many times may keep the result.
    """
    if report.refusal is not None:
        answer = Answer(variants=(VariantAnswer.without_model(f"unsupported: {report.refusal}"),))
        yield Progress(events=(end_event(answer),), answer=answer)
        return
    if request.devices.has_mesh:
        yield from explore_plan(request, report, measure, history=history, clock=clock)
        return
    models, executor = explored_models(request, report), executor_of(measure)
    trial_history = TrialHistory(history, request.budget, len(models))
    answers = []
    for index, model in enumerate(models):
        context = VariantContext(index, model, request, report, executor, trial_history, clock)
        answers.append((yield from _explore_variant(context, prune)))
    answer = Answer(variants=tuple(answers))
    yield Progress(events=(end_event(answer),), recommendation=answer.recommendation, answer=answer)


def _explore_variant(context: VariantContext, prune: PruneSpace) -> Generator[Progress, None, VariantAnswer]:
    """Explore one variant: its recommendation, or why there is none."""
    answer = VariantAnswer(
        num_query_groups=context.variant.num_query_groups,
        capacity_factor=context.variant.capacity_factor,
        num_parameters=count_parameters(context.model),
        recommendation=None,
    )
    try:
        space = prune(context.model, context.request, context.report)
    except EmptySpaceError as error:
        return answer.model_copy(update={"reason": str(error)})
    log = ProgressLog(context, space)
    if space.table is None:
        yield log.step()
        return _without_fit(context, answer)
    search = VariantSearch(context, space, log)
    recommendation = yield from search.run()
    if recommendation is not None:
        history = context.history
        cut_short = history.exhausted(context.index) or history.is_hopeless(context.variant)
        target = None if cut_short else context.request.budget.confidence_target
        return answer.model_copy(update={"recommendation": recommendation, "completed_target": target})
    return _without_recommendation(context, answer, search)


def _without_recommendation(context: VariantContext, answer: VariantAnswer, search: VariantSearch) -> VariantAnswer:
    """The answer of a search that found nothing: memory is short, every trial failed, or the budget was too small."""
    limit, smallest = memory_limit(context.request, context.report.hardware), search.smallest
    all_failed = context.history.failed_for_memory(context.variant) and not search.is_unfinished
    if smallest.reported_factor * smallest.required_bytes > limit or all_failed:
        return _without_fit(context, answer, smallest)
    failure = context.history.commonest_failure(context.variant)
    reason = (
        "the budget ended before a candidate of the space was measured: raise max_seconds or max_trials"
        if failure is None
        else f"no candidate could be measured; most failed with {failure}"
    )
    return answer.model_copy(update={"reason": reason})


def _without_fit(
    context: VariantContext, answer: VariantAnswer, smallest: SmallestCandidate | None = None
) -> VariantAnswer:
    """The answer when no candidate fits, with the changes that would make one fit."""
    relaxations = find_relaxations(context.request, context.report, context.model, smallest)
    reason = explain_nothing_fits(context.request, context.report, context.model, relaxations, smallest)
    return answer.model_copy(update={"reason": reason, "remedies": relaxations})
