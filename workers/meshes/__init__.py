"""What workers measure of meshes of devices: shards of blocks, exchanges, and whole models on all ranks."""
