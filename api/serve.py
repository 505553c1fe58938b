"""Serves the API."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from fastapi import FastAPI

from bexp.api.app import create_app
from bexp.api.listener import bind, listen, url_of
from bexp.api.settings import ServiceSettings
from bexp.client.address import is_loopback
from bexp.storage.database import open_database
from bexp.storage.schema import upgrade
from bexp.storage.tokens import list_tokens

HOW_TO_ADMIT = "The service asks for a token, and there is none yet: create one with `bexp token create NAME`."


def serve(
    settings: ServiceSettings,
    host: str,
    port: int,
    *,
    on_ready: Callable[[str], None] = lambda url: None,
    notify: Callable[[str], None] = lambda message: print(message, file=sys.stderr, flush=True),  # noqa: T201 - the default for a command, where standard error is the log
) -> None:
    """Serve until SIGINT or SIGTERM; bring the database's schema up to date first.

    Args:
        settings: of the service. Tokens are always required if `host` is not a loopback address, or behind a proxy.
        host: name or address to bind to.
        port: 0 for any free port.
        on_ready: called with the URL once requests are answered.
        notify: called with messages for the person who started the service.

    Raises:
        bexp.api.listener.ListenError: the address is in use, or is not an address of this machine.
        ValueError: the database's URL is malformed.
    """
    if not is_loopback(host) or settings.trusted_proxies:
        settings = replace(settings, require_token=True)
    with bind(host, port) as listener:
        _prepare(settings, notify)
        url = url_of(host, listener)
        listen(listener, settings, create_app, on_ready=lambda: on_ready(url), end_streams=end_streams)


def end_streams(app: FastAPI) -> None:
    """End the open streams of events."""
    app.state.service.feed.close()


def _prepare(settings: ServiceSettings, notify: Callable[[str], None]) -> None:
    database = open_database(settings.database_url)
    try:
        upgrade(database)
        if settings.require_token and not list_tokens(database):
            notify(HOW_TO_ADMIT)
    finally:
        database.dispose()
