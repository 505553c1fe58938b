"""Keys of requests: requests that ask the same have one key, so that one answer serves them all."""

from __future__ import annotations

import hashlib
import json

from bexp.explorer.request.request import ExplorationRequest

NOT_ASKED = {"labels", "fresh", "notices", "kept", "budget", "target"}
"""Fields that do not say what is asked. The budget says how well it must be known, which is judged by the answer."""


def request_key(request: ExplorationRequest) -> str | None:
    """Return a text that is equal for requests that ask the same, whatever their labels and budgets.

    None for a target that somebody has written: its code can change while its version does not.
    """
    if request.is_own_code:
        return None
    document = request.model_dump(mode="json", exclude=NOT_ASKED)
    document["target"] = request.target_name
    document["trial_timeout_seconds"] = request.budget.trial_timeout_seconds
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
