"""The MCP server, through which an agent explores: `bexp mcp`. It needs the extra `mcp`."""
