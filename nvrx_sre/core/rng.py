"""Seeded randomness for tests and simulations; the only place outside `checkpoint.rng` that makes a generator."""

from __future__ import annotations

import random

Generator = random.Random
"""Type of a seeded generator."""


def seeded(seed: int) -> Generator:
    """A generator of its own, independent of the global one; the same seed gives the same sequence."""
    return Generator(seed)
