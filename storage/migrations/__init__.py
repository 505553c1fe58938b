"""Alembic migrations of the tables; `storage.schema.upgrade` runs them."""
