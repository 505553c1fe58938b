"""How processes train one model together: torch's own sharding and replication, as a trainer would use them."""
