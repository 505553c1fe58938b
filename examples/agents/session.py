"""A session with `bexp mcp`, as an agent holds it; it prints the calls and the documents as Markdown.

    pip install '.[mcp]'
    python examples/agents/session.py > examples/agents/session.md

Long documents are printed in part: `...` stands for what was left out, here and not in the protocol.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any

from mcp import Client, StdioServerParameters

ENDED = ("succeeded", "failed", "cancelled")
SHOWN = {
    "status": ("job.id", "job.state", "job.micro_batch_size", "certainty"),
    "best": (
        "job.state",
        "recommendation.candidate",
        "recommendation.performance",
        "recommendation.whole_model.tokens_per_second",
        "recommendation.grad_accum_steps",
        "certainty",
    ),
    "explore": ("job.id", "job.state", "job.waiting_reason", "certainty"),
}


def pick(document: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return some of a document's fields by dotted name, and `...` for the rest."""
    picked: dict[str, Any] = {}
    for name in names:
        value: Any = document
        for part in name.split("."):
            value = (value or {}).get(part)
        picked[name] = value
    return {**picked, "...": "..."}


async def main() -> None:
    server = StdioServerParameters(command=sys.executable, args=["-m", "bexp.api.cli", "mcp"])
    async with Client(server) as client:

        async def call(tool: str, *, quiet: bool = False, **arguments: Any) -> dict[str, Any]:
            result = await client.call_tool(tool, arguments)
            document = result.structured_content or {"error": result.content[0].text}
            if not quiet:
                shown = pick(document, SHOWN[tool]) if tool in SHOWN and not result.is_error else document
                blocks = [f"```json\n{text}\n```\n" for text in (json.dumps(arguments), json.dumps(shown, indent=1))]
                print(f"**{tool}**\n", *blocks, sep="\n")
            return document

        async def explore(**fields: Any) -> str:
            arguments = {"config": "examples/tiny-moe.yaml", "fields": fields, "wait_seconds": 5}
            job_id: str = (await call("explore", **arguments))["job"]["id"]
            while (await call("status", quiet=True, exploration=job_id))["job"]["state"] not in ENDED:
                await asyncio.sleep(1)
            await call("status", exploration=job_id)
            return job_id

        tools = ", ".join(tool.name for tool in (await client.list_tools()).tools)
        print(f"# A session\n\n`python examples/agents/session.py` on a CPU of two cores. The tools are {tools}.\n")
        before = await explore(expert_backends=["loop"], budget={"max_seconds": 20})
        after = await explore(budget={"max_seconds": 20})
        await call("best", exploration=after)
        await call("compare", a=before, b=after)
        await call("best", exploration="nothing-like-this")


if __name__ == "__main__":
    asyncio.run(main())
