"""The script that Alembic runs. The caller passes its connection."""

from alembic import context

from bexp.storage.schema import VERSION_TABLE, include_name
from bexp.storage.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    include_name=include_name,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
