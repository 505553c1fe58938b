"""A comparison of two answers: the probability that the second is faster, the differences, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from statistics import median
from typing import Any

from bexp.api.cli.errors import CommandError, ExitCode
from bexp.api.cli.job_ids import find_job
from bexp.client.errors import ProblemError
from bexp.client.explorations import Exploration, Explorations
from bexp.explorer.answers.text import row
from bexp.explorer.cost.step import required_bytes
from bexp.explorer.model.amounts import rate_text, seconds_text
from bexp.explorer.model.base import Frozen
from bexp.explorer.model.spelling import shortened
from bexp.explorer.records.recommendation import Alternative, Recommendation
from bexp.explorer.records.trial import Trial, TrialKind
from bexp.explorer.search.comparison import KNOWN, MeasuredCandidate, compare, throughput_curve, whole_runs
from bexp.explorer.search.confidence import confidence_score

NOT_COMPARED = {
    *("budget", "fresh", "labels", "notices", "sampler", "seed", "verify", "tolerance", "base_micro_batch_size"),
    *("base_recompute", "kept"),
    *("target", "device_kind"),  # None can mean the same as a name; the target and the hardware that ran are compared
}
"""Fields of a request that change the search or the wording, and neither the best candidate nor its speed."""
NAMES = {"model.name", "hf_config._name_or_path", "hf_config.transformers_version", "hf_config.architectures"}
MODELS = ("model", "hf_config")
LENGTH = "model.seq_length"
"""Texts of another length do not make another model."""
MOST_LISTED = 3
"""Fields of two models that are listed one by one where they differ."""
LEAST_LOAD = 0.1
"""The smallest difference between two loads of a host that gets a line: a share of its processors' time."""


class _Known:
    """One of the two answers: the candidate that exports take, and every run of it in the explorations `jobs`.

    The answer is that of the first exploration, and the others ask the same. `without_run` are the others that have no
    run of the candidate.
    """

    def __init__(self, client: Explorations, jobs: list[Exploration]) -> None:
        self.jobs = jobs
        self.job, *further = jobs
        for other in further:
            _check_same_question(self.job, other)
        best = self.job.recommendation
        assert best is not None, "it was checked before"
        self.chosen = best if best.for_batch.candidate == best.candidate else best.for_batch
        trials = {job.id: [] if best.plan else list(client.trials(job.id)) for job in self.jobs}
        self.trials: list[Trial] = [trial for some in trials.values() for trial in some]
        self.without_run = [job.id for job in further if not whole_runs(self.chosen.candidate, trials[job.id])]
        kind = "cpu" if self.job.report is not None and self.job.report.hardware.device_kind == "cpu" else "cuda"
        self.side = MeasuredCandidate(self.chosen, best.run_noise, self.trials, kind).side()
        self.best = best
        self.unit = best.rate_unit
        self.asked = _depends_on(self.job)
        self.curve = throughput_curve(self.chosen, self.side, self.trials or self._source_trials(client), self._fits)

    def _fits(self, trial: Trial) -> bool:
        """Return whether a trial's peak fits with its reserve, as far as both are known."""
        report, request, needed = self.job.report, self.job.request, trial.peak_bytes or 0
        if report is not None and request is not None:
            needed = required_bytes(needed, report.hardware, request.allocator)
        return needed <= self.best.memory_limit_bytes

    @property
    def run_seconds(self) -> float | None:
        """The mean seconds of a whole-model run; None if there was none."""
        taken = [trial.seconds for trial in self.trials if trial.kind is TrialKind.WHOLE_MODEL]
        return sum(taken) / len(taken) if taken else None

    @property
    def host_busy_share(self) -> float | None:
        """The share of the host's processors that other programs used, in the median of its measurements."""
        measurements = [trial.measurement for trial in self.trials]
        parts = chain((m.whole_model for m in measurements), *(m.components for m in measurements))
        conditions = [part.conditions for part in parts if part is not None and part.conditions is not None]
        shares = [each.host_busy_share for each in conditions if each.host_busy_share is not None]
        return median(shares) if shares else None

    @property
    def memory(self) -> dict[str, int]:
        """The bytes at the peak by part. Those of a candidate that is not the recommended one are known in sum."""
        if self.chosen.candidate == self.best.candidate:
            return {name: size for name, size in self.best.memory if size > 0}
        return {"allocated": self.chosen.expected_peak_bytes}

    def _source_trials(self, client: Explorations) -> list[Trial]:
        """Return the trials of the exploration that measured a reused answer; none if it has been deleted."""
        source = self.job.answered_from
        if source is None or self.best.plan:
            return []
        try:
            return list(client.trials(source.exploration))
        except ProblemError:
            return []

    def document(self) -> dict[str, Any]:
        """Return the answer and its figures, as JSON."""
        candidate = self.chosen.candidate.model_dump(mode="json")
        about = {"explorations": [job.id for job in self.jobs], "model": self.job.model, "candidate": candidate}
        known = {
            "is_recommended": isinstance(self.chosen, Recommendation),  # else it is the best that divides the batch
            "confidence": self.chosen.confidence,
            "host_busy_share": self.host_busy_share,
            "rate_unit": self.unit.value,
            "memory": self.memory,
            "required_bytes": self.chosen.required_bytes,
            "memory_limit_bytes": self.best.memory_limit_bytes,
            "curve": [point.model_dump(mode="json") for point in self.curve],
        }
        return {**about, **known, **self.side.model_dump(mode="json")}


class ComparisonText(Frozen):
    """A comparison, as a document and in lines."""

    document: dict[str, Any]
    lines: tuple[str, ...]


def compare_answers(client: Explorations, a: str, b: str) -> ComparisonText:
    """Compare two answers; `a` and `b` are ids, and further ids behind commas bring more runs of the same candidate.

    Two models have no ratio. Raises CommandError without an answer or with rates of two units, and ProblemError if an
    id is not known.
    """
    jobs = [
        list({job.id: job for job in (find_job(client, each) for each in one.split(","))}.values()) for one in (a, b)
    ]
    unanswered = [f"exploration {of[0].id} has {_why_unanswered(of[0])}" for of in jobs if of[0].recommendation is None]
    if unanswered:
        differing = (row("different", line) for line in _differences(_depends_on(jobs[0][0]), _depends_on(jobs[1][0])))
        raise CommandError(ExitCode.NO_ANSWER, "; ".join(unanswered), *differing)
    sides = dict(zip("AB", (_Known(client, each) for each in jobs), strict=True))
    units = [known.unit for known in sides.values()]
    if units[0] is not units[1]:
        reason = f"no ratio says which is faster: A counts {units[0]}/s, and B counts {units[1]}/s"
        raise CommandError(ExitCode.NO_ANSWER, reason)
    pair = compare(sides["A"].side, sides["B"].side)
    asked = sides["A"].asked, sides["B"].asked
    differences = list(_differences(*asked))
    models = _different_models(*sides.values())
    differences += _loads(*(known.host_busy_share for known in sides.values()))
    missing = [line for name, known in sides.items() for line in _not_measured(name, known)]
    taken = [known.run_seconds for known in sides.values()]
    needed = None if models else pair.runs_needed
    seconds = None if needed is None or None in taken else needed * sum(filter(None, taken))
    advice = "none: further runs do not say which of two models is better" if models else _advice(needed, seconds)
    ratio = pair.model_dump(mode="json", exclude={"a", "b"})
    document = {
        **(dict.fromkeys(ratio) if models else ratio),
        "a": sides["A"].document(),
        "b": sides["B"].document(),
        "different_models": models,
        "differs": [{"field": name, "a": asked[0].get(name), "b": asked[1].get(name)} for name in _names(*asked)],
        "differences": differences,
        "not_measured": missing,
        "next_measurement": {"runs_of_each": needed, "seconds": seconds, "advice": advice},
    }
    least, most = pair.speedup_90_percent
    lines = [
        models
        or f"B is faster than A with a probability of {_percent(pair.probability_b_faster)}: {pair.speedup:.3f}x its "
        f"speed, {least:.3f}x to {most:.3f}x with 90%",
        *(row(name, _describe(known)) for name, known in sides.items()),
        *(row("different", line) for line in differences),
        *(row("not measured", line) for line in missing),
        row("next", advice),
    ]
    return ComparisonText(document=document, lines=tuple(lines))


def _why_unanswered(job: Exploration) -> str:
    """Return the words that an exploration without an answer has for it."""
    return "no recommendation" + (f": {job.error}" if job.error else "" if job.is_final else " yet")


def _percent(probability: float) -> str:
    """Return the probability of one of two; that of the likelier one is floored, as confidences are."""
    score = confidence_score(max(probability, 1.0 - probability))
    return f"{score if probability >= 0.5 else 100 - score}%"


def _describe(known: _Known) -> str:
    side, ids = known.side, ", ".join(job.id for job in known.jobs)
    runs = f"{side.num_runs or 'no'} whole run{'' if side.num_runs == 1 else 's'}"
    candidate = known.chosen.candidate.describe()
    if isinstance(known.chosen, Alternative):
        candidate += ", the best that divides the batch"
    rate = rate_text(side.tokens_per_second, known.unit)
    return f"{known.job.model} {ids}, {candidate}: {rate}, {runs}, noise {side.run_noise:.1%}"


def _not_measured(name: str, known: _Known) -> Iterator[str]:
    side = known.side
    if not side.num_runs and known.chosen.candidate.is_whole:
        yield f"{name} in a run of its own; its speed is that of the search's steps"
    elif not side.num_runs:
        yield f"{name} as a whole model; its speed follows from measured parts"
    elif side.num_runs == 1:
        yield (
            f"the noise between whole runs of {name}, of which there is one: the probability rests on noise that was "
            "seen elsewhere, in its parts and between runs of other models"
        )
    for job_id in known.without_run:
        yield f"the candidate of {name} in exploration {job_id}, which has no whole run of it"


def _advice(needed: int | None, seconds: float | None) -> str:
    if needed == 0:
        return "none: which one is faster is known"
    if needed is None:
        return "none: so many runs would be needed that the difference hardly matters; take either"
    about = "" if seconds is None else f", about {seconds_text(seconds)},"
    runs = f"{needed} more run{'' if needed == 1 else 's'} of each"
    return (
        f"{runs}{about} would tell them apart with {KNOWN:.0%} if the difference stays: explore both again with "
        "fresh: true (option --fresh), and compare ID,ID with ID,ID"
    )


def _depends_on(job: Exploration) -> dict[str, Any]:
    """Return the values that an answer depends on, by dotted names."""
    asked = job.request
    request = {} if asked is None else asked.model_dump(mode="json", exclude=NOT_COMPARED)
    hardware = None if job.report is None else job.report.hardware
    names = ("device_name", "versions")
    device = dict.fromkeys(names) if hardware is None else hardware.model_dump(mode="json", include=set(names))
    values = {**request, "target": None if asked is None else asked.target_name, "device": device}
    return {name: value for name, value in _flatten(values) if name not in NAMES}


def _check_same_question(first: Exploration, other: Exploration) -> None:
    """Raise CommandError if `other` differs from `first` in its request or in its device."""
    if not (first.report and other.report):  # no device has run one of them
        other = other.model_copy(update={"report": first.report})
    differences = list(_differences(_depends_on(first), _depends_on(other), (first.id, other.id)))
    if differences:
        reason = f"the runs of {other.id} are not further runs of {first.id}, because what they measured differs"
        raise CommandError(ExitCode.USAGE, reason, *differences)


def _flatten(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _names(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs."""
    return [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]


def _is_of_model(name: str) -> bool:
    return name.partition(".")[0] in MODELS


def _different_models(a: _Known, b: _Known) -> str | None:
    """Return a sentence if the answers are of two models, whose speeds say nothing of each other; else None.

    A training command states no model: its name is all that is known.
    """
    states = any(_is_of_model(name) and value is not None for known in (a, b) for name, value in known.asked.items())
    if states:
        differ = any(_is_of_model(name) and name != LENGTH for name in _names(a.asked, b.asked))
    else:
        differ = a.job.model != b.job.model
    if not differ:
        return None
    same_name = f"two models called {a.job.model}"
    models = same_name if a.job.model == b.job.model else f"different models, {a.job.model} and {b.job.model}"
    return f"The answers are of {models}. The work of their {a.unit} differs, so a ratio does not say which is better."


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], of: tuple[str, str] = ("A", "B")) -> Iterator[str]:
    names = _names(a, b)
    models = [name for name in names if _is_of_model(name)]
    if len(models) > MOST_LISTED:
        yield f"model: {len(models)} fields, such as {', '.join(models[:MOST_LISTED])}"
        names = [name for name in names if name not in models]
    for name in names:
        yield f"{name}: {shortened(a.get(name))} in {of[0]}, {shortened(b.get(name))} in {of[1]}"


def _loads(a: float | None, b: float | None) -> Iterator[str]:
    if a is not None and b is not None and abs(a - b) >= LEAST_LOAD:
        yield f"load of the host by other programs: {a:.0%} of its processors in A, {b:.0%} in B"
