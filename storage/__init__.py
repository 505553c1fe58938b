"""The database: jobs, trials, events, tokens. SQLAlchemy 2 on SQLite or PostgreSQL."""
