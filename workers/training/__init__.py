"""Processes that train one model together, by torch's own sharding and replication, as a trainer would use them."""
