"""The tables. Their names have a prefix, because Optuna's tables in the same database include `trials`."""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from sqlalchemy.types import TypeDecorator

PREFIX = "bexp_"


class UTCDateTime(TypeDecorator[datetime]):
    """A time in UTC that is read back with its time zone, also from SQLite, which stores none."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:  # noqa: D102 - SQLAlchemy's own method
        if value is None:
            return None
        assert value.tzinfo is not None, "a datetime without a time zone cannot be stored"
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:  # noqa: D102 - SQLAlchemy's own method
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class PlainText(TypeDecorator[str]):
    """Text of any origin, such as the output of a crashed process, without the NUL and lone surrogates that PostgreSQL
    refuses.
    """

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:  # noqa: D102 - SQLAlchemy's
        return None if value is None else _plain(value)


class Shortened(TypeDecorator[str]):
    """The beginning of such a text, for a column of an index or one that people read."""

    impl = sa.String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:  # noqa: D102 - SQLAlchemy's
        return None if value is None else _plain(value)[: self.length]


def _plain(text: str) -> str:
    return text.replace("\0", "").encode("utf-8", "replace").decode()


metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_JSON = sa.JSON(none_as_null=True)

IS_QUEUED = sa.text("state = 'queued'")
"""A condition on `jobs`. SQLite uses the index of it only for a query with these words, without a parameter."""

jobs = sa.Table(
    f"{PREFIX}jobs",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("priority", sa.Integer, nullable=False, doc="Among the jobs of its owner."),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("request", _JSON, nullable=False),
    sa.Column("model_name", sa.String(128), nullable=False, doc="Of the request."),
    sa.Column("device_kind", sa.String(16)),
    sa.Column("target", sa.String(64), nullable=False, doc="A worker must have it."),
    sa.Column("devices_needed", sa.Integer, nullable=False),
    sa.Column("memory_needed_bytes", sa.BigInteger, doc="Of each device, where the request states it."),
    sa.Column(
        "own_worker",
        sa.String(32),
        nullable=False,
        doc="The name of the only worker that may take it, which a command has started; empty if any may.",
    ),
    sa.Column("own_worker_until", UTCDateTime, doc="Until then its own worker counts as alive."),
    sa.Column("created_at", UTCDateTime, nullable=False),
    sa.Column("queued_at", UTCDateTime, nullable=False, doc="When it was last put in the queue."),
    sa.Column("started_at", UTCDateTime),
    sa.Column("finished_at", UTCDateTime),
    sa.Column("attempt", sa.Integer, nullable=False, doc="Claims so far; with the worker, the fence of every write."),
    sa.Column(
        "num_releases",
        sa.Integer,
        nullable=False,
        doc="Claims that do not count: a clean shutdown or a fault ended them, or a trial was stored later.",
    ),
    sa.Column("num_faults", sa.Integer, nullable=False, doc="Since the last stored trial."),
    sa.Column("not_before", UTCDateTime, doc="A job that was put back is not claimed earlier."),
    sa.Column("worker", sa.String(128), doc="Its id; it holds the lease."),
    sa.Column("lease_expires_at", UTCDateTime),
    sa.Column("cancel_requested", sa.Boolean, nullable=False),
    sa.Column("fingerprint", sa.String(64), doc="Of the hardware that the first claim pinned."),
    sa.Column("report", _JSON),
    sa.Column("space", _JSON),
    sa.Column("recommendation", _JSON),
    sa.Column("micro_batch_size", sa.Integer, doc="Of the recommendation."),
    sa.Column("confidence", sa.Integer, doc="Of the recommendation."),
    sa.Column("answer", _JSON),
    sa.Column("error", PlainText),
    sa.Column("waiting_reason", PlainText),
    sa.Column("last_seq", sa.Integer, nullable=False),
    sa.Column("version", sa.Integer, nullable=False, doc="Grows with every visible change."),
    sa.Column("idempotency_key", sa.String(255), unique=True, doc="A hash of the owner and its key."),
    sa.Column("body_hash", sa.String(64)),
    sa.Column(
        "request_key", sa.String(64), index=True, doc="Equal for requests that ask the same; null if never reused."
    ),
    sa.Column("software", PlainText, doc="The target and libraries that measured it; null if a version changed."),
    sa.Column("serves_up_to", sa.Integer, doc="The highest confidence target of a request that the answer serves."),
    sa.Column(
        "reused_from", sa.String(32), index=True, doc="The job that measured the answer, which may be deleted by now."
    ),
    sa.Column("measured_at", UTCDateTime, doc="When that job finished."),
    sa.Column("stored_bytes", sa.BigInteger, doc="Its bytes in all tables; null until they are counted anew."),
    sa.Column("device_name", Shortened(255), doc="Of the report."),
    sa.Column("confidence_target", sa.Integer, doc="Of the request."),
    sa.Column("performance", sa.Float, doc="Of the recommendation, relative to its base."),
    sa.Column("tokens_per_second", sa.Float, doc="To expect of one device with the recommendation."),
    sa.Column("rate_unit", sa.String(16), doc="What these tokens_per_second count."),
    sa.Column("notes", PlainText, doc="What people have written on it."),
    sa.Index(None, "created_at", "id"),
    sa.Index(None, "state", "created_at"),
    sa.Index(None, "owner", "created_at"),
    sa.Index(None, "owner", "stored_bytes"),
    sa.Index(None, "model_name", "created_at"),
    sa.Index(f"ix_{PREFIX}jobs_searched", "model_name", "device_name", "owner", "id"),
    sa.Index(
        f"ix_{PREFIX}jobs_queued",
        *("state", "owner", "priority", "created_at", "id", "own_worker", "device_kind"),
        sqlite_where=IS_QUEUED,
        postgresql_where=IS_QUEUED,
    ),
)

labels = sa.Table(
    f"{PREFIX}labels",
    metadata,
    sa.Column("job_id", sa.ForeignKey(jobs.c.id, ondelete="CASCADE"), primary_key=True),
    sa.Column("key", sa.String(63), primary_key=True),
    sa.Column("value", sa.String(128), nullable=False),
    sa.Index(None, "key", "value", "job_id"),
)

# A rowid would make SQLite store each primary key twice.
events = sa.Table(
    f"{PREFIX}events",
    metadata,
    sa.Column("job_id", sa.ForeignKey(jobs.c.id, ondelete="CASCADE"), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", UTCDateTime, nullable=False),
    sa.Column("code", sa.Integer, nullable=False),
    sa.Column("message", PlainText, nullable=False),
    sa.Column("data", _JSON, nullable=False),
    sqlite_with_rowid=False,
)

recommendations = sa.Table(
    f"{PREFIX}recommendations",
    metadata,
    sa.Column("job_id", sa.ForeignKey(jobs.c.id, ondelete="CASCADE"), primary_key=True),
    sa.Column(
        "seq", sa.Integer, primary_key=True, autoincrement=False, doc="Of the event since which it is recommended."
    ),
    sa.Column("at", UTCDateTime, nullable=False),
    sa.Column("micro_batch_size", sa.Integer, nullable=False),
    sa.Column("performance", sa.Float, nullable=False, doc="Relative to the base candidate."),
    sa.Column("confidence", sa.Integer, nullable=False, doc="Out of 100."),
    sa.Column("tokens_per_second", sa.Float, nullable=False, doc="To expect of one device."),
    sa.Column("peak_bytes", sa.BigInteger, nullable=False, doc="To expect of one device."),
    sa.Column("candidate", _JSON, nullable=False, doc="Without what it leaves open."),
    sqlite_with_rowid=False,
)

trials = sa.Table(
    f"{PREFIX}trials",
    metadata,
    sa.Column("job_id", sa.ForeignKey(jobs.c.id, ondelete="CASCADE"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("seq", sa.Integer, nullable=False, doc="Grows in the order of storing, which is not that of number."),
    sa.Column("at", UTCDateTime, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("micro_batch_size", sa.Integer, nullable=False),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("tokens_per_second", sa.Float, doc="Of one device."),
    sa.Column("peak_bytes", sa.BigInteger, doc="As measured."),
    sa.Column("seconds", sa.Float, nullable=False, doc="Wall time of the measurement."),
    sa.Column("trial", _JSON, nullable=False, doc="The rest; a field that is absent has its default."),
    sa.UniqueConstraint("job_id", "seq"),
    sqlite_with_rowid=False,
)

run_reports = sa.Table(
    f"{PREFIX}run_reports",
    metadata,
    sa.Column("job_id", sa.ForeignKey(jobs.c.id, ondelete="CASCADE"), primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False, doc="Counts from 1 in the order of storing."),
    sa.Column("at", UTCDateTime, nullable=False),
    sa.Column("report", _JSON, nullable=False),
)

components = sa.Table(
    f"{PREFIX}components",
    metadata,
    sa.Column("environment", sa.String(16), primary_key=True, doc="A hash of hardware and versions."),
    sa.Column("subject", sa.String(32), primary_key=True, doc="A hash of what the component is a part of."),
    sa.Column("component", sa.String(32), primary_key=True, doc="A hash of the component's key."),
    sa.Column("source", sa.String(16), primary_key=True, doc="Tells explorations apart without naming one."),
    sa.Column("device", Shortened(255), nullable=False),
    sa.Column("versions", Shortened(255), nullable=False, doc="For people."),
    sa.Column("at", UTCDateTime, nullable=False),
    sa.Column("measurement", _JSON, nullable=False),
    sa.Index(None, "subject"),
    sa.Index(None, "source"),
    sa.Index(None, "at"),
)

workers = sa.Table(
    f"{PREFIX}workers",
    metadata,
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("host", PlainText, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("device_kind", sa.String(16), nullable=False),
    sa.Column("device_name", PlainText, nullable=False),
    sa.Column("num_devices", sa.Integer, nullable=False),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("devices", PlainText, nullable=False),
    sa.Column("versions", _JSON, nullable=False, doc="Of what it measures with, by name."),
    sa.Column("targets", _JSON, nullable=False, doc="The version of each target, by name."),
    sa.Column("memory_limit_bytes", sa.BigInteger, nullable=False, doc="What a job may use of a device by default."),
    sa.Column("held_by", sa.Text, doc="Who has the devices, while the worker waits for them."),
    sa.Column("memory_bytes", sa.BigInteger, nullable=False, doc="What one may ask for at most."),
    sa.Column("name", sa.String(32), nullable=False, doc="Jobs name it that it alone may take; else empty."),
    sa.Column("gpus", _JSON, doc="The use and the temperature of each GPU at its last report, as far as NVML says."),
    sa.Column("started_at", UTCDateTime, nullable=False),
    sa.Column("last_seen_at", UTCDateTime, nullable=False),
)

tokens = sa.Table(
    f"{PREFIX}tokens",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("prefix", sa.String(16), nullable=False, index=True),
    sa.Column("digest", sa.String(64), nullable=False, doc="SHA-256 of the secret, in hexadecimal."),
    sa.Column("created_at", UTCDateTime, nullable=False),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("scopes", sa.String(64), nullable=False),
    sa.Column("expires_at", UTCDateTime),
)

quotas = sa.Table(
    f"{PREFIX}quotas",
    metadata,
    sa.Column("owner", sa.String(64), primary_key=True, doc="`*`: of each owner without a row of its own."),
    sa.Column("max_queued", sa.Integer),
    sa.Column("max_running", sa.Integer),
    sa.Column("max_stored_bytes", sa.BigInteger),
)

turns = sa.Table(
    f"{PREFIX}turns",
    metadata,
    sa.Column("owner", sa.String(64), primary_key=True),
    sa.Column("claimed_at", UTCDateTime, nullable=False, doc="When a worker last took a job of this owner."),
)

audit = sa.Table(
    f"{PREFIX}audit",
    metadata,
    # SQLite counts by itself only in a column of the type INTEGER, which has 64 bits there.
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("at", UTCDateTime, nullable=False, index=True),
    sa.Column("action", sa.String(32), nullable=False),
    sa.Column("subject", sa.String(64), nullable=False, doc="The id of a job, or the name of a token or an owner."),
    sa.Column("owner", sa.String(64), nullable=False, doc="Who did it."),
    sa.Column("token", sa.String(64)),
    sa.Column("origin", Shortened(255)),
)

leaders = sa.Table(
    f"{PREFIX}leaders",
    metadata,
    sa.Column("role", sa.String(32), primary_key=True),
    sa.Column("holder", sa.String(128), nullable=False),
    sa.Column("expires_at", UTCDateTime, nullable=False),
)
