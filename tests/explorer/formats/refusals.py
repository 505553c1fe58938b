"""What is said of a document that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from bexp.explorer.formats.document import FormatError
from bexp.explorer.formats.request import parse_request


def refusal(document: Any, **overrides: Any) -> dict[tuple[str | int, ...], str]:
    """Return the message of each place at fault."""
    with pytest.raises(FormatError) as caught:
        parse_request(document, overrides=overrides)
    return dict(caught.value.errors)
