"""The base of every value that crosses a process or a network boundary."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable, closed to unknown keys, and free of NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
