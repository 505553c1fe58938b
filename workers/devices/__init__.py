"""The devices of a host: finding, choosing and locking them."""
