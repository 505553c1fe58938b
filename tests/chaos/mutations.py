"""Faults that somebody could put into the product's code. Each must be noticed: `python -m tests.chaos.mutants`."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.interposition import Change

QUEUE, SUBMISSION, EVENTS, DATABASE = (f"bexp.storage.{name}" for name in ("queue", "submission", "events", "database"))

_WRITE_END = "write_job(self.database, connection, lease, drafts, **values, **end_values(self.database, state, error))"
_FINISH = f"""        with self.database.begin() as connection:
            {_WRITE_END}
            if trial is not None:
                insert_trial(self.database, connection, lease.job_id, trial)
"""
_RECORD = """                last_seq = write_job(self.database, connection, lease, progress.events, **values)
            if trial is not None:
                insert_trial"""


@dataclass(frozen=True)
class Mutation:
    """A fault, and the tests of the contract that it breaks.

    Attributes:
        text: what it does.
        changes: of the product's modules.
        tests: what concerns it, as pytest takes it.
        databases: those on which it changes anything.
        transactions: at whose edges a campaign strikes; none: at those of all.
    """

    text: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]
    databases: tuple[str, ...] = ("SQLite", "PostgreSQL")
    transactions: tuple[str, ...] = ()


_LEASES, _CANCELS = "tests/contracts/test_leases.py", "tests/contracts/test_cancels.py"

MUTATIONS = {
    "answer-after-end": Mutation(
        "the answer is stored after the end, in a transaction of its own without a fence",
        (
            (
                QUEUE,
                _FINISH,
                f"""        of_answer = ("answer", "serves_up_to", "recommendation", "micro_batch_size", "confidence")
        late = {{name: values.pop(name) for name in of_answer if name in values}}
{_FINISH}        if late:
            with self.database.begin() as connection:
                connection.execute(sa.update(jobs).where(jobs.c.id == lease.job_id).values(**late))
""",
            ),
        ),
        ("tests/contracts/test_queue.py", _LEASES, "tests/contracts/test_events.py"),
        transactions=("Queue.finish",),
    ),
    "finish-without-fence": Mutation(
        "a worker that lost its lease ends the exploration all the same",
        (
            (
                QUEUE,
                _WRITE_END,
                _WRITE_END.replace("write_job", "change_job").replace("lease", "[jobs.c.id == lease.job_id]", 1),
            ),
        ),
        (_LEASES,),
        transactions=("Queue.finish",),
    ),
    "cancel-of-finished": Mutation(
        "a cancel ends a finished exploration again",
        ((QUEUE, "if not JobState(row.state).is_final:", "if True:"),),
        (_CANCELS,),
    ),
    "ignored-key": Mutation(
        "an idempotency key is ignored",
        ((SUBMISSION, "hashed = None if key is None else stored_key(owner, key)", "hashed = None"),),
        ("tests/contracts/test_submission.py",),
    ),
    "lost-cancel": Mutation(
        "the cancel of a running exploration is not stored",
        ((QUEUE, "[here], cancel_requested=True)", "[here])"),),
        (_CANCELS,),
    ),
    "cancel-lost-with-lease": Mutation(
        "the cancel of an exploration is forgotten when its worker puts it back",
        ((QUEUE, '"lease_expires_at": None,\n', '"lease_expires_at": None, "cancel_requested": False,\n'),),
        (_CANCELS,),
    ),
    "wrong-text-of-search": Mutation(
        "a figure in the text of a trial's event is another",
        (
            (
                EVENTS,
                '"message": draft.message, "data": data}',
                '"message": draft.message.replace(" 4", " 5"), "data": data}',
            ),
        ),
        ("tests/contracts/test_events.py", "tests/contracts/test_queue.py", _LEASES),
    ),
    "wrong-text-of-claim": Mutation(
        "the event of a claim counts a trial too many",
        (("bexp.storage.progress", 'f"{num_trials} stored', 'f"{num_trials + 1} stored'),),
        (_LEASES,),
    ),
    "late-answers": Mutation(
        "the service waits for its database for a minute before it says 503",
        (
            ("bexp.api.settings", "answer_seconds: float = 4.5", "answer_seconds: float = 60.0"),
            (DATABASE, "lock: timedelta = timedelta(seconds=3)", "lock: timedelta = timedelta(seconds=60)"),
            (DATABASE, "statement: timedelta = timedelta(seconds=4)", "statement: timedelta = timedelta(seconds=60)"),
            (DATABASE, "turn: timedelta = timedelta(seconds=1.5)", "turn: timedelta = timedelta(seconds=60)"),
        ),
        ("tests/api/test_background.py", "tests/api/test_deadlines.py", "tests/contracts/test_database.py"),
    ),
    "asynchronous-commit": Mutation(
        "PostgreSQL confirms a commit before it is on the disk",
        (
            (
                DATABASE,
                "'idle_in_transaction_session_timeout', '{idle}', true)",
                "'idle_in_transaction_session_timeout', '{idle}', true), set_config('synchronous_commit', 'off', true)",
            ),
        ),
        ("tests/contracts/test_database.py", "tests/api/test_postgresql.py"),
        ("PostgreSQL",),
    ),
    "repeated-commit": Mutation(
        "a step whose commit was not confirmed is stored again",
        ((QUEUE, "*([] if after_seq is None else [jobs.c.last_seq == after_seq])]", "]"),),
        (_LEASES,),
        transactions=("Queue.record",),
    ),
    "split-step": Mutation(
        "a trial is stored after its event, in a transaction of its own",
        (
            (
                QUEUE,
                _RECORD,
                _RECORD.replace(
                    "            if trial is not None:\n",
                    "        with self.database.begin() as connection:\n            if trial is not None:\n",
                ),
            ),
        ),
        ("tests/contracts/test_queue.py", _LEASES),
        transactions=("Queue.record",),
    ),
}
"""By name."""
