"""Freed memory stays with the process, so that the next generation does not wait for the kernel."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, sys
from nvrx_sre.session.heap import keep_freed_memory

def faults_of_a_block():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(b"x") * (64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert keep_freed_memory()
first, second = faults_of_a_block(), faults_of_a_block()
assert first > 1000, first
assert second < first / 10, (first, second)
"""


def test_the_next_block_takes_the_pages_of_the_last() -> None:
    """64 MiB, freed and taken again: hardly a page is fetched from the kernel (glibc, which the tests run on)."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
