"""Conversations with `bexp mcp`, as the official SDK's client holds them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from bexp.api.agents.http import create_app
from bexp.api.settings import Limits
from tests.api.serving import start_app
from tests.waits import PATIENCE_SECONDS

Call = Callable[..., Awaitable[Any]]
MESSAGE = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
ACCEPTED = {"Accept": "application/json, text/event-stream"}
READING = {"status", "best", "compare", "trials"}


def talk(server: Any, conversation: Callable[[Client, Call], Awaitable[None]], **headers: str) -> None:
    """Hold a conversation with a server; `call` returns the document of a tool, or the text of its failure."""

    async def main() -> None:
        async with httpx2.AsyncClient(headers=headers, timeout=PATIENCE_SECONDS) as http_client:
            over_http = isinstance(server, str)
            await hold(streamable_http_client(server, http_client=http_client) if over_http else server)

    async def hold(transport: Any) -> None:
        async with Client(transport) as client:

            async def call(tool: str, **arguments: Any) -> Any:
                result = await client.call_tool(tool, arguments)
                return getattr(result.content[0], "text", None) if result.is_error else result.structured_content

            await conversation(client, call)

    anyio.run(main)


def serve(service_url: str, host: str = "127.0.0.1") -> Iterator[str]:
    limits = Limits()
    served = start_app(create_app(service_url, host, limits), limits, host=host)
    yield f"{served.url}/mcp"
    served.stop()
