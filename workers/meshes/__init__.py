"""Measurements of meshes of devices: shards of blocks, exchanges, and whole models on all ranks."""
