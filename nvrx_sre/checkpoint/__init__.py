"""Two-tier checkpoints: hot slots in shared memory, durable DCP directories."""
