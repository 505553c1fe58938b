"""What a list shows of a job and finds it by, without its documents."""

from __future__ import annotations

import base64
import time
from datetime import UTC, datetime, timedelta

import psutil
import pytest
import sqlalchemy as sa

from bexp.api.settings import ServiceSettings
from bexp.explorer.records.event import Progress
from bexp.explorer.records.recommendation import Answer, VariantAnswer
from bexp.explorer.request.request import Budget
from bexp.storage.database import Database
from bexp.storage.jobs import InvalidCursorError, JobFilter, JobState, JobSummary, get_summary, list_jobs
from bexp.storage.owners import USUAL_SCOPES, Caller
from bexp.storage.queue import Queue
from bexp.storage.tables import jobs, labels
from tests.api.serving import in_process
from tests.contracts.jobs import claim_one, store
from tests.contracts.samples import MODEL, make_recommendation, make_report, make_request

MOST_SECONDS = 0.3


def shown(job: JobSummary) -> tuple[object, ...]:
    return job.device_name, job.micro_batch_size, job.performance, job.tokens_per_second, job.confidence


def test_a_list_shows_the_device_and_the_best_so_far(database: Database, queue: Queue) -> None:
    job, _ = queue.enqueue(make_request(budget=Budget(confidence_target=80)))
    assert shown(get_summary(database, job.id)) == (None, None, None, None, None)
    lease = claim_one(queue).lease
    queue.pin(lease, make_report("NVIDIA H200"))
    queue.record(lease, Progress(recommendation=make_recommendation(4)))
    (listed,), _ = list_jobs(database)
    assert shown(listed) == ("NVIDIA H200", 4, 1.2, 1000.0, 45)
    assert listed.confidence_target == 80
    nothing = Answer(variants=(VariantAnswer(num_query_groups=4, num_parameters=1, recommendation=None),))
    queue.finish(lease, JobState.SUCCEEDED, last=Progress(answer=nothing))
    assert shown(get_summary(database, job.id)) == ("NVIDIA H200", None, None, None, None)


@pytest.fixture
def stored(database: Database) -> Database:
    """Three explorations, the last of which a worker has taken."""
    queue = Queue(database)
    for number, (owner, value) in enumerate((("team-a", "search"), ("team-b", "50%"), ("team-b", "search"))):
        labelled = make_request(seed=number, labels={"run": value})
        queue.enqueue(labelled, by=Caller(owner, USUAL_SCOPES), job_id=f"{number}")
    queue.pin(claim_one(queue).lease, make_report("NVIDIA H200"))
    return database


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("", "210"),
        ("h200", "0"),
        ("TINY", "210"),
        ("run=SEARCH", "20"),
        ("search team-b", "2"),
        ("%", "1"),
        ("_", ""),
        ("h200 team-b", ""),
    ],
)
def test_words_are_searched_in_models_devices_owners_and_labels(stored: Database, search: str, found: str) -> None:
    assert "".join(job.id for job in list_jobs(stored, JobFilter(search=search))[0]) == found


@pytest.mark.parametrize(
    ("search", "is_found"), [("ABCD", True), ("abcdef1 tiny", True), ("abc", False), ("bcde", False)]
)
def test_four_characters_at_the_beginning_find_an_id(database: Database, search: str, is_found: bool) -> None:
    Queue(database).enqueue(make_request(), job_id="abcdef12")
    assert bool(list_jobs(database, JobFilter(search=search))[0]) is is_found


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ((("run", "search"),), "20"),
        ((("run", "search"), ("run", "50%")), ""),
        ((("ru", "search"),), ""),
        ((("runs", "search"),), ""),
        ((("run", "5"),), ""),
        ((("run", "z"),), ""),
    ],
)
def test_a_label_is_both_its_key_and_its_value(
    stored: Database, labels: tuple[tuple[str, str], ...], found: str
) -> None:
    assert "".join(job.id for job in list_jobs(stored, JobFilter(labels=labels))[0]) == found


def test_a_list_of_10000_is_searched_in_300_ms(database: Database) -> None:
    """Of the processor, over REST, with documents of some kilobytes in each row. Other programs do not change that."""
    Queue(database).enqueue(make_request())
    with database.begin() as connection:
        row = connection.execute(sa.select(jobs)).one()._asdict()
        row |= {"answer": {"text": "x" * 2_000}, "state": "succeeded"}
        numbers = sa.select(sa.literal(0).label("n")).cte(recursive=True)
        numbers = numbers.union_all(sa.select(numbers.c.n + 1).where(numbers.c.n < 9_999))

        def numbered(prefix: str, count: int) -> sa.ColumnElement[str]:
            return sa.literal(prefix) + sa.cast(numbers.c.n % count, sa.String)

        named = {
            **{"id": numbered("j", 10_000), "model_name": numbered("m-", 40)},
            **{"device_name": numbered("h", 7), "owner": numbered("team-", 9)},
        }
        values = [named.get(column.name, sa.literal(row[column.name], column.type)) for column in jobs.c]
        connection.execute(sa.insert(jobs).from_select([*jobs.c], sa.select(*values).select_from(numbers)))
        labelled = [numbered("j", 10_000), sa.literal("run"), numbered("v", 100)]
        connection.execute(sa.insert(labels).from_select([*labels.c], sa.select(*labelled).select_from(numbers)))
    queries = ("", "search=h3", "search=nothing", "search=m-7+h3+run%3Dv7", "state=succeeded&search=team-3")
    with in_process(ServiceSettings(database.engine.url.render_as_string(hide_password=False))) as client:

        def measured(query: str) -> float:
            start = processor_seconds(database)
            assert client.get(f"/v1/explorations?{query}").json()["items"] or query == "search=nothing"
            return processor_seconds(database) - start

        assert max(min(measured(query) for _ in range(6)) for query in queries) < MOST_SECONDS


def processor_seconds(database: Database) -> float:
    """What this process has taken of the processor, and PostgreSQL's processes."""
    seconds = time.process_time()
    if database.engine.dialect.name == "postgresql":
        with database.read() as connection:
            backend = psutil.Process(connection.scalar(sa.text("SELECT pg_backend_pid()")))
        server = backend.parent()
        assert server is not None
        seconds += sum(sum(each.cpu_times()[:4]) for each in (server, *server.children()))  # and of ended children
    return seconds


@pytest.fixture
def seven(database: Database) -> Database:
    """Seven jobs in an order that is neither that of their ids nor of their storing; three came at once."""
    queue, at = Queue(database), datetime(2026, 1, 15, 21, tzinfo=UTC)
    states = [*JobState, JobState.QUEUED, JobState.FAILED]
    for place, (name, minute) in enumerate(zip("fdbaceg", (3, 1, 2, 2, 2, 4, 0), strict=True)):
        queue.enqueue(make_request(model=MODEL.model_copy(update={"name": name}), fresh=True), job_id=name * 16)
        created_at = at + timedelta(minutes=minute)
        store(database, name * 16, created_at=created_at, state=states[place].value, owner=name)
    return database


def names(found: list[JobSummary]) -> str:
    return "".join(job.id[0] for job in found)


@pytest.mark.parametrize("limit", range(1, 9))
def test_the_newest_come_first_on_pages_of_any_size(seven: Database, limit: int) -> None:
    pages, cursor = list[str](), None
    while not pages or (cursor is not None and len(pages) < 9):
        page, cursor = list_jobs(seven, limit=limit, cursor=cursor)
        pages.append(names(page))
    assert pages == ["efcbadg"[start : start + limit] for start in range(0, 7, limit)]


def test_a_filter_finds_what_is_equal_and_nothing_beside_it(seven: Database) -> None:
    for name in "abcdefg":
        for wanted in (JobFilter(model=name), JobFilter(owner=name)):
            assert names(list_jobs(seven, wanted)[0]) == name
    states = dict(zip("fdbaceg", [*JobState, JobState.QUEUED, JobState.FAILED], strict=True))
    for state in JobState:
        found = names(list_jobs(seven, JobFilter(state=state))[0])
        assert sorted(found) == sorted(name for name in states if states[name] is state)


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-15T21:00:00~abc",
        "2026-01-15T21:00:00+00:00~a-b",
        "2026-01-15T21:00:00+00:00~",
        "2026-01-15T21:00:00+00:00",
        "0001-01-01T00:00:00+14:00~abc",
        "yesterday~abc",
        "",
    ],
)
def test_a_cursor_that_no_list_gave_out_is_refused(sqlite_database: Database, text: str) -> None:
    with pytest.raises(InvalidCursorError, match="not one that this list gave out"):
        list_jobs(sqlite_database, cursor=base64.urlsafe_b64encode(text.encode()).decode())
