"""Seeded randomness for tests and simulations; the only place outside `checkpoint.rng` that makes a generator."""

from __future__ import annotations

import random


def seeded(seed: int) -> random.Random:
    """A generator of its own, independent of the global one; the same seed gives the same sequence."""
    return random.Random(seed)
