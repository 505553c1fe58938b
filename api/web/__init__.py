"""The page at `/`: its files, and a report of one exploration in one file."""
