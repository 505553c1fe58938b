"""Answers that say what is wrong."""

from __future__ import annotations

from typing import Any


def assert_problem(response: Any, status: int) -> None:
    assert response.status_code == status, response.text
    assert response.headers["Content-Type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    assert problem["title"]
    assert problem["type"]
    assert problem["instance"].startswith("/")
