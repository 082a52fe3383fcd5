"""The ring of steps: what goes in comes out, in order, whatever is full, half written or damaged."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.events import step_ring
from nvrx_sre.events.step_ring import NUM_STEPS, StepRecord, StepRing

ALL = 2**63
FIRST_PLACE = step_ring.COUNTS_BYTES
DIGEST_OFFSET = 15 * 8


def record(number: int) -> StepRecord:
    """Something like a step's that no other has."""
    return (number, 1, number, 3, 4, 5, 6, 7, -1, 1, 10, 11, number, 13, number / 4)


@dataclass
class Ends:
    """Both ends of a ring, and its memory as a third party sees it."""

    rank: StepRing
    launcher: StepRing

    def put(self, first: int, last: int) -> list[bool]:
        """Store the records of these numbers; which of them asked for the launcher."""
        return [self.rank.put(record(number)) for number in range(first, last + 1)]

    def taken(self, until: int = ALL) -> list[int]:
        """Numbers of the records that the launcher takes."""
        records = self.launcher.take(until)
        numbers = [item[0] for item in records]
        assert records == list(map(record, numbers))
        return numbers

    def overwrite(self, word: int, number: int) -> None:
        """Damage a count: 0 is what was written, 128 what was taken."""
        os.pwrite(self.launcher.fd, number.to_bytes(8, "little"), word)

    def flip(self, place: int, offset: int = 5) -> None:
        """Change a bit of a place, or change it back."""
        begin = FIRST_PLACE + place * step_ring.PLACE_BYTES + offset
        (byte,) = os.pread(self.launcher.fd, 1, begin)
        os.pwrite(self.launcher.fd, bytes([byte ^ 1]), begin)


@pytest.fixture
def ends() -> Iterator[Ends]:
    """An empty ring."""
    launcher = StepRing.create()
    made = Ends(StepRing.map(os.dup(launcher.fd)), launcher)
    yield made
    made.rank.close()
    made.launcher.close()


def test_what_is_stored_is_taken_once_and_in_order(ends: Ends) -> None:
    """Over several laps, and never more than was asked for."""
    expected = 0
    for num in (1, 7, 5000, NUM_STEPS, NUM_STEPS - 1, 3, NUM_STEPS):
        ends.put(expected, expected + num - 1)
        assert ends.launcher.has_more and ends.rank.num_written == expected + num
        assert ends.taken(until=expected + 1) == [expected]
        assert ends.taken() == list(range(expected + 1, expected + num))
        assert not ends.launcher.has_more and ends.taken() == []
        expected += num
    assert (ends.rank.num_replaced, ends.launcher.num_damaged) == (0, 0)


def test_a_full_ring_keeps_the_newest_step_in_the_place_of_the_one_before(ends: Ends) -> None:
    """Nothing of the older ones is lost, the newest is never lost, and what was is counted."""
    ends.put(1, NUM_STEPS)
    assert all(ends.put(NUM_STEPS + 1, NUM_STEPS + 4)), "the launcher is to come"
    assert ends.rank.num_replaced == 4
    assert ends.taken() == [*range(1, NUM_STEPS), NUM_STEPS + 4]
    ends.put(NUM_STEPS + 5, NUM_STEPS + 5)
    assert ends.taken() == [NUM_STEPS + 5] and ends.rank.num_replaced == 4


def num_shared_bytes() -> int:
    """Shared memory that this process has mapped and touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem")) * 1024


def test_what_an_end_holds_does_not_grow_with_the_steps(ends: Ends) -> None:
    """Each end has the pages of the whole ring from the beginning."""
    held = num_shared_bytes()
    assert held >= 2 * step_ring.RING_BYTES
    ends.put(1, NUM_STEPS)
    assert len(ends.taken()) == NUM_STEPS
    assert num_shared_bytes() == held


def test_the_launcher_is_called_at_half_full(ends: Ends) -> None:
    """And not for each step beyond the half: once more at most, where a lap ends in it."""
    for _ in range(3):
        asked = ends.put(1, NUM_STEPS - 1)
        assert 1 <= asked.count(True) <= 2 and asked.index(True) == NUM_STEPS // 2
        assert len(ends.taken()) == NUM_STEPS - 1
        assert not any(ends.put(1, NUM_STEPS // 2))
        assert len(ends.taken()) == NUM_STEPS // 2


def test_a_step_that_is_not_whole_yet_is_left_for_the_next_look(ends: Ends) -> None:
    """Its writer may have been put aside in the middle, or another core see its stores in another order."""
    ends.put(1, 3)
    ends.flip(2)
    assert ends.taken() == [1, 2] and ends.launcher.has_more
    assert ends.taken() == []
    ends.flip(2)
    assert ends.taken() == [3] and ends.launcher.num_damaged == 0


def test_a_damaged_place_costs_that_step_alone(ends: Ends) -> None:
    """It is counted; a damaged checksum is no better than a damaged step."""
    ends.put(1, 5)
    ends.flip(0)
    ends.flip(3, offset=DIGEST_OFFSET)
    assert ends.taken() == [2, 3, 5] and ends.launcher.num_damaged == 2


def test_a_place_of_the_lap_before_is_no_step(ends: Ends) -> None:
    """The count may be seen before what it counts."""
    ends.put(1, NUM_STEPS)
    ends.taken()
    counts = ends.rank.num_written + 1
    os.pwrite(ends.launcher.fd, counts.to_bytes(8, "little"), 0)
    assert ends.launcher.has_more and ends.taken() == []


def test_nobody_can_cut_the_memory_off(ends: Ends) -> None:
    """The launcher would die of the next look."""
    with pytest.raises(PermissionError):
        os.ftruncate(ends.launcher.fd, 0)


@given(st.binary(min_size=8, max_size=8), st.binary(min_size=8, max_size=8))
def test_counts_that_somebody_wrote_over_cost_no_more_than_a_lap(written: bytes, taken: bytes) -> None:
    """A look ends, whatever a script has done to the memory."""
    ring = StepRing.create()
    os.pwrite(ring.fd, written, 0)
    os.pwrite(ring.fd, taken, 128)
    assert ring.take(ALL) == [] and ring.num_damaged <= NUM_STEPS
    ring.close()


@pytest.mark.parametrize("number", [0, 1, 7, 12, NUM_STEPS - 1, NUM_STEPS + 3, 10 * NUM_STEPS, 2**64 - 1])
@pytest.mark.parametrize("word", [0, 128])
def test_a_damaged_count_lasts_until_the_next_step_and_look(ends: Ends, word: int, number: int) -> None:
    """However far it is off: what was stored before and behind it is taken once, and the newest always."""
    ends.put(0, 9)
    assert ends.taken(until=5) == [0, 1, 2, 3, 4]
    ends.overwrite(word, number)
    before = ends.taken()
    assert before == list(range(5, 5 + len(before)))
    ends.put(10, 14)
    assert before + ends.taken() == list(range(5, 15))
    ends.put(15, NUM_STEPS + 20)
    assert ends.taken() == [*range(15, NUM_STEPS + 14), NUM_STEPS + 20]
    assert (ends.launcher.num_damaged, ends.rank.num_replaced) == (0, 6)


def test_steps_that_a_rank_wrote_over_unseen_are_counted_and_the_newest_are_taken(ends: Ends) -> None:
    """Its ring looked empty to it, since somebody wrote over what was taken."""
    ends.put(0, 9)
    ends.overwrite(128, 2**40)
    ends.put(10, NUM_STEPS + 29)
    assert ends.taken() == list(range(30, NUM_STEPS + 30))
    assert (ends.launcher.num_damaged, ends.rank.num_replaced) == (30, 0)


def test_a_launcher_of_another_process_finds_the_same_digests(ends: Ends) -> None:
    """The hash of numbers depends on no process's seed; the smallest and the largest, and a loss that is unknown."""
    extremes: list[StepRecord] = [
        (*(-(2**63),) * 14, -0.0),
        (*(2**63 - 1,) * 14, 1e308),
        (*(0,) * 14, math.inf),
        (*(-1, 2**61 - 1, 2**61, -2, 1, 0, 5, 2**62, -1, 1, 7, 8, 2**40, 9), 5e-324),
    ]
    code = (
        "import os, sys\n"
        "from nvrx_sre.events.step_ring import StepRing\n"
        "ring = StepRing.map(int(sys.argv[1]))\n"
        f"for record in {extremes!r}:\n"
        "    ring.put(record)\n"
    ).replace("inf", "float('inf')")
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code, str(ends.launcher.fd)]
    subprocess.run(command, pass_fds=[ends.launcher.fd], env=environment, check=True)
    assert ends.launcher.take(ALL) == extremes
