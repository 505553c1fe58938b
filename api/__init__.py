"""Everything a person or a program talks to: REST, server-sent events, the client, the command line."""
