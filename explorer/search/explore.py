"""An exploration from request to answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace

from bexp.explorer.cost.parameters import count_parameters
from bexp.explorer.cost.step import memory_limit
from bexp.explorer.dimensions.place import EmptySpaceError
from bexp.explorer.model.parts import ModelParts
from bexp.explorer.records.device_report import DeviceReport
from bexp.explorer.records.event import Progress, end_event
from bexp.explorer.records.recommendation import Answer, VariantAnswer
from bexp.explorer.records.trial import Measure, Trial, executor_of
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.candidate_space import CandidateSpace
from bexp.explorer.search.event_messages import (
    adapted_experts_event,
    space_event,
    variant_event,
    weights_event,
    wider_space_event,
)
from bexp.explorer.search.history import TrialHistory
from bexp.explorer.search.legal_space import PruneSpace, explored_models, prune_space
from bexp.explorer.search.loop import ProgressLog, SearchLoop, VariantContext
from bexp.explorer.search.relaxations import explain_without_fit
from bexp.explorer.search.restored import restore_space
from bexp.explorer.search.search_space import SearchExtension, SearchSpace, extension_for


def explore(
    request: ExplorationRequest,
    report: DeviceReport,
    measure: Measure,
    *,
    history: Sequence[Trial] = (),
    clock: Callable[[], float] = time.perf_counter,
    prune: PruneSpace | None = None,
) -> Iterator[Progress]:
    """Run a request on a device and yield the results step by step. The last step has the answer.

    Each `Progress` must be stored before the next is asked for.

    Args:
        request: what may vary.
        report: the device and its back ends.
        measure: runs one trial; failures are outcomes, never exceptions. A `TrialExecutor` may run several at once:
            what is suggested then depends on the order in which they end, and on nothing else but the seed.
        history: trials that an earlier run of the same request stored. Nothing in them is measured again, and the
            search goes on as it would have gone. What was in flight when that run ended is measured again.
        clock: seconds that trials and suggestions are charged by; a recorded device brings its own.
        prune: enumerates a variant's space for a caller who explores one space many times; no trial widens that.
    """
    if report.refusal is not None:
        answer = Answer(variants=(VariantAnswer.without_model(report.refusal),))
        yield Progress(events=(end_event(answer, request.budget.confidence_target),), answer=answer)
        return
    request = report.commanded(request)
    extension = extension_for(request)
    models = explored_models(request, report) if extension is None else extension.models_of(request) or ()
    executor = executor_of(measure)
    trial_history = TrialHistory(history, request.budget, len(models))
    answers = []
    for index, model in enumerate(models):
        context = VariantContext(index, model, request, report, executor, trial_history, clock)
        answers.append((yield from _explore_variant(context, prune, extension)))
    answer = Answer(variants=tuple(answers))
    end = end_event(answer, request.budget.confidence_target)
    yield Progress(events=(end,), recommendation=answer.recommendation, answer=answer)


def _explore_variant(
    context: VariantContext, prune: PruneSpace | None, extension: SearchExtension | None
) -> Generator[Progress, None, VariantAnswer]:
    """Explore one variant: its recommendation, or why there is none."""
    answer = VariantAnswer(
        num_query_groups=context.variant.num_query_groups,
        capacity_factor=context.variant.capacity_factor,
        num_parameters=count_parameters(context.model),
        recommendation=None,
    )
    log = ProgressLog(is_main=context.is_main)
    try:
        space: SearchSpace | None = (
            open_candidates(context, prune, log) if extension is None else extension.open_space(context, log)
        )
    except EmptySpaceError as error:
        return answer.model_copy(update={"reason": str(error)})
    if space is None:
        yield log.step()
        reason, remedies = explain_without_fit(context.request, context.report, context.model)
        return answer.model_copy(update={"reason": reason, "remedies": remedies})
    said = bool(context.trials) and space.is_refuted  # before a resume
    recommendation = yield from SearchLoop(context, space, log).run()
    if isinstance(space, CandidateSpace) and (large := space.first_too_large) is not None:
        wider = prune_space(context.model, context.request, context.report, is_short=True)
        log.describe_space(wider.legal.summarize())
        if not said:
            log.add(wider_space_event(wider.legal, large))
            yield log.step()
        space = CandidateSpace(context, wider, log)
        recommendation = yield from SearchLoop(context, space, log).run()
    if recommendation is None:
        reason, remedies = space.explain()
        return answer.model_copy(update={"reason": reason, "remedies": remedies})
    cut_short = context.history.exhausted(context.index) or context.history.is_hopeless(context.variant)
    cut_short = cut_short or space.is_cut_short
    target = None if cut_short else context.request.budget.confidence_target
    known = {"recommendation": recommendation, "completed_target": target, "importance": space.importance()}
    return answer.model_copy(update=known)


def open_candidates(context: VariantContext, prune: PruneSpace | None, log: ProgressLog) -> CandidateSpace | None:
    """Return the candidates of a variant that may fit; None if none may. The log gets the events of the space."""
    if prune is None:
        space = restore_space(context.model, context.request, context.report, context.trials)
    else:
        space = replace(prune(context.model, context.request, context.report), trusted=frozenset())
    if not context.trials:  # after a resume that was said before
        if len(context.request.space.variants()) > 1:
            log.add(variant_event(context.model))
        limit = memory_limit(context.request, context.report.hardware)
        log.add(space_event(space.legal, space.num_predicted_out, limit, num_dominated=space.num_dominated))
        if isinstance(context.model, ModelParts) and context.model.weights:
            log.add(weights_event(context.model.weights))
        if (left_out := adapted_experts_event(context.report.expert_backends)) is not None:
            log.add(left_out)
        log.describe_space(space.legal.summarize())
    return None if space.table is None else CandidateSpace(context, space, log)
