"""Workers own devices: they claim jobs and profile candidates. Of the service, only this package imports torch."""
