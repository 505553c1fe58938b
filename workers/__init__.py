"""Workers, which own devices, claim jobs and profile candidates. Of the service, only this package imports torch."""
