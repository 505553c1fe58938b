"""Measures one sequence length for benchmarks/context_parallel_step.py: whole steps by layout, and a search."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from benchmarks.context_parallel_search import SharedComponents, search
from benchmarks.context_parallel_summary import RAN, Row, key_of, key_of_candidate, seconds_once_a_step, summarize
from bexp.explorer.cost_model.candidate_table import SpaceTable, predict_memory
from bexp.explorer.cost_model.step import combine_seconds, memory_limit
from bexp.explorer.records.measurement import Outcome, judge
from bexp.explorer.records.trial import TrialKind, TrialPlan, count_processes
from bexp.explorer.spec.candidate import Candidate, Recompute
from bexp.explorer.spec.context_parallel import Sharing
from bexp.explorer.spec.hardware import DeviceReport
from bexp.explorer.spec.options import BTASpec
from bexp.explorer.spec.request import ExplorationRequest
from bexp.workers.process.interface import DeviceProfiler
from bexp.workers.profiler.trials.whole_model import LONG_STEP_SECONDS

POLICIES = (Recompute.NONE, Recompute.ACTIVATIONS, Recompute.PROJECTIONS, Recompute.FULL)
"""Recomputation, cheapest first."""
REPEATED_SECONDS = 5 * LONG_STEP_SECONDS
"""The most seconds for warming up and repeating a short step."""
MAX_TAINTED = 2
"""How often a run is made if other programs on the device, or heat, slowed it down."""


class UnservedError(ValueError):
    """The attention back end that is asked for serves no sequences that several devices share."""


@dataclass(frozen=True)
class Setup:
    """The settings that all lengths of a run share."""

    num_devices: int
    sizes: tuple[int, ...]
    attention: str | None
    num_layers: int
    search_seconds: float
    trial_seconds: float

    @property
    def batch_size(self) -> int:
        """The sequences of a step: one for each group of the smallest size."""
        return self.num_devices // min(self.sizes)

    def identity(self, base: ExplorationRequest) -> Row:
        """The settings that a run must share with one that continues it."""
        own = {"batch_size": self.batch_size, "training": base.training.model_dump(mode="json")}
        shape = base.model.model_dump(mode="json", exclude={"seq_length", "num_layers"})
        budgets = {"search_seconds", "trial_seconds"}
        return own | {"model": shape} | {k: v for k, v in asdict(self).items() if k not in budgets}

    def request(self, base: ExplorationRequest, seq_length: int) -> ExplorationRequest:
        """Return the request for one length. Layouts, sizes and recomputation may vary.

        Raises:
            ValueError: sequences of this length cannot be shared in this way.
        """
        model = base.model.model_dump() | {"seq_length": seq_length, "num_layers": self.num_layers}
        budget = base.budget.model_dump() | {
            "max_seconds": self.search_seconds,
            "trial_timeout_seconds": self.trial_seconds,
        }
        fields = base.model_dump() | {
            "model": model,
            "micro_batch_size": 1,
            "base_micro_batch_size": None,
            "batch_size": self.batch_size,
            "num_devices": self.num_devices,
            "num_query_groups": None,
            "device_kind": None,
            "bta": BTASpec(enable=False).model_dump(),
            "recompute": None if base.recompute is None else tuple(p for p in POLICIES if p in base.recompute),
            "attention_backends": None if self.attention is None else (self.attention,),
            "context_parallel": {"sizes": self.sizes},
            "verify": False,
            "budget": budget,
        }
        return ExplorationRequest.model_validate(fields)


class Bench:
    """Fills `cells`, which has a JSON object for every length. An object that exists is continued.

    Nothing is started that is expected to end after `deadline`, a value of time.monotonic().
    """

    def __init__(
        self,
        setup: Setup,
        profiler: DeviceProfiler,
        requests: Mapping[int, ExplorationRequest],
        cells: list[Row],
        deadline: float,
    ) -> None:
        self.requests = requests
        self._setup = setup
        self._profiler = profiler
        self._cells = cells
        self._deadline = deadline
        self._begun: tuple[int, DeviceReport] | None = None
        self._measure = SharedComponents(profiler.measure)

    def run_round(self, length: int, turn: int) -> Iterator[str]:
        """Run every layout that round number `turn` lacks, and yield a line for each run.

        If a run is out of memory, its size moves to the next policy. All runs of that policy are then missing in this
        round and in the earlier ones.
        """
        cell = self._cell(length)
        while (candidate := self._next(cell, turn)) is not None and self._has_time(self._expected(cell, candidate)):
            run = self._run(cell, candidate, turn)
            if run["outcome"] in RAN:
                found = f"{run['step_seconds']:.3f} s a step, {run['trial_seconds']:.1f} s in all"
            else:
                found = f"{run['outcome']}: {run['reason']}"
            yield f"S={length} round {turn}: {candidate.describe()}: {found}"

    def search(self, length: int) -> Iterator[str]:
        """Let the explorer choose among sizes and layouts, and run its choice whole if no round has. Yields lines.

        It runs when the first round is complete.
        """
        cell = self._cell(length)
        if self._lacks_search(cell) and self._next(cell, 0) is None and self._has_time(self._setup.search_seconds):
            searched = cell["search"] = self._search(cell)
            summarize(cell)
            yield f"S={length}: searched for {searched['seconds']:.1f} s"
        if cell["search"] is None or cell["search"]["candidate"] is None:
            return
        chosen = Candidate.model_validate(cell["search"]["candidate"])
        is_new = not any(key_of(run) == key_of_candidate(chosen) for run in cell["runs"])
        if is_new and self._has_time(self._expected(cell, chosen)):
            self._run(cell, chosen, 0)
            yield f"S={length}: ran {chosen.describe()}"

    def left_out(self, rounds: int, *, search: bool) -> list[str]:
        """The runs that there was no time for."""
        found = []
        cells = {cell["seq_length"]: cell for cell in self._cells}
        for length in self.requests:
            cell = cells.get(length)
            if cell is None:
                found.append(f"S={length}")
                continue
            found += [f"S={length} round {turn}" for turn in range(rounds) if self._next(cell, turn) is not None]
            if search and self._lacks_search(cell):
                found.append(f"S={length} search")
        return found

    def _lacks_search(self, cell: Row) -> bool:
        """Whether there is no search yet of a length at which something runs."""
        return cell["search"] is None and (bool(cell["layouts"]) or self._next(cell, 0) is not None)

    def _cell(self, length: int) -> Row:
        """Return the cell of a length. A new cell asks the device which back ends serve the model."""
        for cell in self._cells:
            if cell["seq_length"] == length:
                return cell
        request, report = self.requests[length], self._begin(length)
        found: Row = {
            "seq_length": length,
            "batch_size": request.batch_size,
            "attention": _attention(request, report),
            "experts": report.default_experts if request.model.moe is not None else None,
            "policies": {},
            "runs": [],
            "layouts": [],
            "search": None,
            "choice": None,
        }
        for size in request.context_parallel_sizes:
            found["policies"][str(size)] = [policy.value for policy in self._fitting(found, size, report)]
        self._cells.append(found)
        return found

    def _has_time(self, seconds: float) -> bool:
        return time.monotonic() + seconds <= self._deadline

    def _expected(self, cell: Row, candidate: Candidate) -> float:
        """Return the most seconds that a run may take, from the latest run of its layout; 0 if that is not known.

        The time grows with the square of the length, except for building the model. Shorter steps may be repeated more.
        """
        layout = candidate.context_parallel_size, candidate.context_parallel_layout
        known = [
            (abs(other["seq_length"] - cell["seq_length"]), other["seq_length"], run)
            for other in self._cells
            for run in other["runs"]
            if (run["size"], run["layout"]) == layout and run["outcome"] in RAN
        ]
        if not known:
            return 0.0
        _, length, run = min(known, key=lambda found: found[0])
        computed = float(run["phases"]["warm_up"] + run["phases"]["timed"])
        growth = float(cell["seq_length"] / length) ** 2
        grown = growth * computed if growth >= 1 else min(computed, max(REPEATED_SECONDS, growth * computed))
        return float(run["trial_seconds"] - computed + grown)

    def _begin(self, length: int) -> DeviceReport:
        if self._begun is None or self._begun[0] != length:
            self._begun = (length, self._profiler.begin(self.requests[length]))
        return self._begun[1]

    def _fitting(self, cell: Row, size: int, report: DeviceReport) -> list[Recompute]:
        """Return the policies from the cheapest one on that is predicted to fit with all layouts of a size."""
        request = self.requests[cell["seq_length"]]
        allowed = [policy for policy in POLICIES if policy in request.recompute_policies]
        sharings = [sharing for sharing in request.sharings if sharing.size == size]
        for i, policy in enumerate(allowed):
            candidates = [_candidate(cell, request, sharing, policy) for sharing in sharings]
            required = predict_memory(SpaceTable(candidates, request.model, request), report.hardware)
            if max(required) <= memory_limit(request, report.hardware):
                return allowed[i:]
        return []

    def _next(self, cell: Row, turn: int) -> Candidate | None:
        """Return the runs that round number `turn`, or an earlier one, lacks."""
        request = self.requests[cell["seq_length"]]
        for earlier in range(turn + 1):
            sharings = request.sharings if earlier % 2 == 0 else request.sharings[::-1]
            for sharing in sharings:
                policy = _policy(cell, sharing.size)
                if policy is None:
                    continue
                candidate = _candidate(cell, request, sharing, policy)
                own = [run for run in cell["runs"] if key_of(run) == key_of_candidate(candidate)]
                if any(run["outcome"] not in RAN for run in own):
                    continue
                sound = sum(run["outcome"] == "ok" for run in own)
                if sound <= earlier and len(own) - sound < MAX_TAINTED:
                    return candidate
        return None

    def _run(self, cell: Row, candidate: Candidate, turn: int) -> Row:
        request, report = self.requests[cell["seq_length"]], self._begin(cell["seq_length"])
        started = time.monotonic()
        found = judge(
            self._profiler.measure(
                TrialPlan(
                    number=len(cell["runs"]),
                    kind=TrialKind.WHOLE_MODEL,
                    model=request.model,
                    candidate=candidate,
                    num_processes=count_processes(TrialKind.WHOLE_MODEL, candidate, (), request, report.hardware),
                    timeout_seconds=self._setup.trial_seconds,
                )
            )
        )
        run: Row = {
            "size": candidate.context_parallel_size,
            "layout": candidate.context_parallel_layout,
            "recompute": candidate.recompute.value,
            "round": turn,
            "outcome": found.outcome.value,
            "reason": found.reason,
            "trial_seconds": time.monotonic() - started,
            "phases": found.phases.model_dump(mode="json"),
            "whole_model": None,
        }
        if found.whole_model is not None:
            whole = run["whole_model"] = found.whole_model.model_dump(mode="json")
            step = combine_seconds(
                whole["micro_step_seconds"],
                seconds_once_a_step(whole),
                candidate.micro_batch_size,
                request.model,
                request,
                context_parallel_size=candidate.context_parallel_size,
            )
            run |= {"step_seconds": step.step, "tokens_per_second": step.tokens_per_second}
        cell["runs"].append(run)
        summarize(cell)
        return run

    def _search(self, cell: Row) -> Row:
        """The candidates of all sizes and layouts, each with a policy with which its size was run."""
        request, report = self.requests[cell["seq_length"]], self._begin(cell["seq_length"])
        policies = {row["recompute"] for row in cell["layouts"]}
        narrowed = request.model_copy(
            update={
                "recompute": tuple(policy for policy in POLICIES if policy.value in policies),
                "attention_backends": (cell["attention"],),
                "expert_backends": None if cell["experts"] is None else (cell["experts"],),
            }
        )
        return search(narrowed, report, self._measure)


def _attention(request: ExplorationRequest, report: DeviceReport) -> str:
    """Return the requested back end, or torch's own choice, or else the first that serves shared sequences.

    Raises:
        UnservedError: none of these does.
    """
    serving = [b.name for b in report.attention_backends if b.usable and b.context_parallel]
    asked = [name for name in request.attention_backends or (report.default_attention, *serving) if name in serving]
    if not asked:
        raise UnservedError(
            f"--attention: only {', '.join(serving) or 'nothing'} serves shared sequences on this device"
        )
    return asked[0]


def _candidate(cell: Row, request: ExplorationRequest, sharing: Sharing, policy: Recompute) -> Candidate:
    return Candidate(
        micro_batch_size=1,
        recompute=policy,
        attention_backend=cell["attention"],
        expert_backend=cell["experts"],
        num_query_groups=request.model.query_groups,
        context_parallel_size=sharing.size,
        context_parallel_layout=sharing.layout,
    )


def _policy(cell: Row, size: int) -> Recompute | None:
    """Return the cheapest policy of a size with which no layout ran out of memory; null if there is none."""
    exhausted = {
        run["recompute"] for run in cell["runs"] if run["size"] == size and run["outcome"] == Outcome.OUT_OF_MEMORY
    }
    return next((Recompute(name) for name in cell["policies"][str(size)] if name not in exhausted), None)
