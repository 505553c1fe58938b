"""An exploration from request to answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import optuna
from optuna.samplers import BaseSampler
from optuna.study import Study

from explorer.cost_model.parameters import count_parameters
from explorer.cost_model.search_space import EmptySpaceError
from explorer.records.event import Progress
from explorer.records.recommendation import Answer, VariantAnswer
from explorer.records.trial import Measure, Trial
from explorer.search.event_messages import end_event
from explorer.search.history import TrialHistory
from explorer.search.setup import OpenStudy, PruneSpace, prune_space
from explorer.search.variant_search import VariantSearch
from explorer.spec.hardware import DeviceReport
from explorer.spec.request import ExplorationRequest


def explore(
    request: ExplorationRequest,
    report: DeviceReport,
    measure: Measure,
    *,
    history: Sequence[Trial] = (),
    open_study: OpenStudy | None = None,
    clock: Callable[[], float] = time.perf_counter,
    prune: PruneSpace = prune_space,
) -> Iterator[Progress]:
    """Run a request on a device and hand out what is learnt, step by step; the last step has the answer.

    Args:
        request: what may vary.
        report: the device and its back ends.
        measure: runs one trial; failures are outcomes, never exceptions. A `TrialExecutor` may run several at once:
            what is suggested then depends on the order in which they end, and on nothing else beside the seed.
        history: trials that an earlier run of the same request stored. Nothing in them is measured again, and the
            search goes on as it would have gone. What was in flight when that run ended is measured again.
        open_study: opens the Optuna study of a variant by name; default: in memory.
        clock: seconds that trials and suggestions are charged by; a recorded device brings its own.
        prune: enumerates a variant's space; a caller who explores one space many times may keep the result.

    Each `Progress` must be stored before the next is asked for.
    """
    trial_history = TrialHistory(history, request.budget, len(request.variants()))
    answers = []
    for index in range(len(request.variants())):
        search = VariantSearch(
            index, request, report, measure, trial_history, open_study or _in_memory, clock=clock, prune=prune
        )
        try:
            yield from search.run()
        except EmptySpaceError as error:
            search.reason = str(error)
        answers.append(
            VariantAnswer(
                num_query_groups=search.model.query_groups,
                num_parameters=count_parameters(search.model),
                recommendation=search.recommendation,
                reason=search.reason,
                remedies=search.remedies,
            )
        )
    answer = Answer(variants=tuple(answers))
    yield Progress(events=(end_event(answer),), recommendation=answer.recommendation, answer=answer)


def _in_memory(name: str, sampler: BaseSampler) -> Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would announce every trial on stderr
    return optuna.create_study(study_name=name or None, sampler=sampler, direction="maximize")
