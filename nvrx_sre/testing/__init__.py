"""Testing tools that are product: manual clock, memory store, simulated world."""
