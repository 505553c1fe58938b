"""Alembic migrations of the tables; `bexp.storage.schema.upgrade` runs them."""
