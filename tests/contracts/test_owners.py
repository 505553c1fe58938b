"""What belongs to one owner is not there for another, and who did what is written down; on both databases."""

from __future__ import annotations

from datetime import timedelta

import pytest
import sqlalchemy as sa

from bexp.storage.audit import Action, prune_audit, read_audit
from bexp.storage.database import Database
from bexp.storage.jobs import JobFilter, JobNotFoundError, JobState, get_job, get_summary, list_jobs
from bexp.storage.owners import LOCAL, USUAL_SCOPES, Caller, Scope
from bexp.storage.queue import Queue
from bexp.storage.tables import audit, jobs, tokens
from bexp.storage.tokens import (
    TokenExistsError,
    create_token,
    digest_of,
    find_revoked,
    list_tokens,
    parse_lifetime,
    revoke_token,
    verify_token,
)
from tests.contracts.samples import make_request, make_worker

A = Caller("team-a", USUAL_SCOPES, "ci", "10.0.0.1")
B = Caller("team-b", USUAL_SCOPES)
ADMIN = Caller("ops", frozenset({Scope.ADMIN}))


def submit(queue: Queue, by: Caller, key: str | None = None, **changes: object) -> tuple[str, bool]:
    job, is_new = queue.enqueue(make_request(**changes), by=by, idempotency_key=key)
    return job.id, is_new


def test_the_jobs_of_another_owner_are_not_there(database: Database, queue: Queue) -> None:
    mine, _ = submit(queue, A)
    for look in (get_job, get_summary):
        assert look(database, mine, owner=A.sees).owner == "team-a"
        assert look(database, mine, owner=ADMIN.sees).id == mine
        with pytest.raises(JobNotFoundError):
            look(database, mine, owner=B.sees)
    with pytest.raises(JobNotFoundError):
        queue.request_cancel(mine, by=B)
    theirs, _ = submit(queue, B)
    assert [job.id for job in list_jobs(database, JobFilter(owner=A.sees))[0]] == [mine]
    assert {job.id for job in list_jobs(database, JobFilter(owner=ADMIN.sees))[0]} == {mine, theirs}
    assert queue.request_cancel(mine, by=ADMIN).state is JobState.CANCELLED


def test_notes_are_the_owners_and_stay(database: Database, queue: Queue) -> None:
    mine, _ = submit(queue, A)
    with pytest.raises(JobNotFoundError):
        queue.write_notes(mine, "not mine", by=B)
    before = get_job(database, mine)
    written = queue.write_notes(mine, "twice\n<b>", by=A)
    assert (before.notes, written.notes, written.version) == (None, "twice\n<b>", before.version + 1)
    assert queue.write_notes(mine, "twice\n<b>", by=A).version == written.version
    queue.request_cancel(mine, by=A)
    assert queue.resume(mine, by=A).notes == get_job(database, mine).notes == "twice\n<b>"
    assert queue.write_notes(mine, "", by=ADMIN).notes is None
    done = [(one.action, one.owner) for one in read_audit(database) if one.action is Action.WRITE_NOTES]
    assert done == [(Action.WRITE_NOTES, "ops"), (Action.WRITE_NOTES, "team-a")]


@pytest.mark.parametrize("end", ["cancelled", "being cancelled", "failed", "a day old"])
def test_an_idempotency_key_is_free_again(database: Database, queue: Queue, end: str) -> None:
    first, _ = submit(queue, A, "k")
    if end == "cancelled":
        queue.request_cancel(first, by=A)
    elif end == "a day old":
        with database.begin() as connection:
            connection.execute(sa.update(jobs).values(created_at=database.clock(-timedelta(hours=24, seconds=1))))
    else:
        claim = queue.claim(make_worker("w"))
        assert claim is not None
        if end == "failed":
            queue.finish(claim.lease, JobState.FAILED)
        else:
            queue.request_cancel(first, by=A)
    second, is_new = submit(queue, A, "k", seed=7)
    assert is_new
    assert second != first
    assert submit(queue, A, "k", seed=7) == (second, False)


def test_a_token_has_an_owner_scopes_and_an_end(database: Database) -> None:
    scopes = frozenset({Scope.SUBMIT, Scope.READ})
    short = create_token(database, "short", owner="team-a", scopes=scopes, lifetime=timedelta(seconds=-1), by=A)
    usual = create_token(database, "usual")
    found = verify_token(database, short)
    assert found is not None
    assert (found.name, found.owner, found.scopes) == ("short", "team-a", scopes)
    assert found.expires_at is not None
    assert found.has_expired
    assert list_tokens(database)[0] == found
    other = verify_token(database, usual)
    assert other is not None
    assert (other.owner, other.scopes, other.expires_at, other.has_expired) == ("local", USUAL_SCOPES, None, False)
    for owner, chosen in (("a b", scopes), ("*", scopes), ("team-a", frozenset[Scope]())):
        with pytest.raises(ValueError, match=r"owner|scope"):
            create_token(database, "wrong", owner=owner, scopes=chosen)


def test_revoked_and_expired_tokens_are_found(database: Database) -> None:
    valid = create_token(database, "valid", lifetime=timedelta(hours=1))
    expired = create_token(database, "expired", lifetime=timedelta(seconds=-1))
    revoked = create_token(database, "revoked")
    revoke_token(database, "revoked")
    digests = {secret: digest_of(secret) for secret in (valid, expired, revoked)}
    assert find_revoked(database, set(digests.values())) == {digests[expired], digests[revoked]}


def test_lifetimes_are_a_number_and_a_unit() -> None:
    assert parse_lifetime("90d") == timedelta(days=90)
    assert [parse_lifetime(text).total_seconds() for text in ("2h", "3m", "4s")] == [7200, 180, 4]
    for text in ("", "90", "0d", "-1d", "1w", "1.5d", "1000000d"):
        with pytest.raises(ValueError, match="lifetime"):
            parse_lifetime(text)


def test_who_did_what_is_written_down_and_pruned_by_age(database: Database, queue: Queue) -> None:
    job_id, _ = submit(queue, A, "k")
    submit(queue, A, "k")  # the same job: nothing was submitted
    queue.request_cancel(job_id, by=ADMIN)
    queue.request_cancel(job_id, by=ADMIN)  # it has ended
    create_token(database, "t", by=LOCAL)
    revoke_token(database, "t", by=LOCAL)
    revoke_token(database, "t", by=LOCAL)
    found = [(record.action, record.subject, record.owner) for record in read_audit(database)]
    assert found == [
        (Action.REVOKE_TOKEN, "t", "local"),
        (Action.CREATE_TOKEN, "t", "local"),
        (Action.CANCEL, job_id, "ops"),
        (Action.SUBMIT, job_id, "team-a"),
    ]
    (mine,) = read_audit(database, owner="team-a")
    assert (mine.token, mine.origin) == ("ci", "10.0.0.1")
    assert read_audit(database, limit=1)[0].action is Action.REVOKE_TOKEN
    first, *later = read_audit(database)
    assert read_audit(database, before=first.id) == later
    assert read_audit(database, before=later[0].id, limit=1) == later[1:2]
    with database.begin() as connection:
        old = database.clock(-timedelta(days=2))
        connection.execute(sa.update(audit).where(audit.c.owner == "local").values(at=old))
        connection.execute(sa.update(audit).where(audit.c.id == first.id).values(at=database.clock(-timedelta(days=3))))
    assert prune_audit(database, timedelta(days=1), at_most=1) == 1
    assert read_audit(database)[0].action is Action.CREATE_TOKEN, "the oldest goes first, whatever its id"
    assert prune_audit(database, timedelta(days=1)) == 1
    assert [record.owner for record in read_audit(database)] == ["ops", "team-a"]


def name_of(database: Database, secret: str) -> str | None:
    token = verify_token(database, secret)
    return None if token is None else token.name


def test_a_token_is_known_until_it_is_revoked(database: Database) -> None:
    secret = create_token(database, "laptop")
    other = create_token(database, "ci")
    assert name_of(database, secret) == "laptop"
    assert name_of(database, other) == "ci"
    assert [token.name for token in list_tokens(database)] == ["ci", "laptop"]
    assert revoke_token(database, "laptop")
    assert verify_token(database, secret) is None
    assert name_of(database, other) == "ci"
    assert not revoke_token(database, "laptop")


def test_the_secret_is_not_stored(database: Database) -> None:
    secret = create_token(database, "laptop")
    with database.read() as connection:
        row = connection.execute(sa.select(tokens)).one()
    assert secret not in str(row)
    assert (len(secret), row.prefix) == (len("bexp_") + 43, secret[:11]), "256 bits in base64, and how they begin"


def test_a_wrong_secret_is_nobody(database: Database) -> None:
    secret = create_token(database, "laptop")
    for ending in ("x", "", "é", "\0", "\ud800", " "):
        wrong = secret[:-1] + ending
        assert verify_token(database, wrong if wrong != secret else wrong[:-1] + "y") is None
        assert verify_token(database, ending) is None


def test_names_are_unique_and_plain(database: Database) -> None:
    create_token(database, "laptop")
    with pytest.raises(TokenExistsError, match="laptop"):
        create_token(database, "laptop")
    for name in ("", "a b", "x" * 65, "-x", "a\n"):
        with pytest.raises(ValueError, match="name"):
            create_token(database, name)
