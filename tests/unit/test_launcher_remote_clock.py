"""What another host's clock means here, and waits that grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.core.backoff import Backoff
from nvrx_sre.core.rng import seeded
from nvrx_sre.launcher.remote_clock import NUM_BEATS, RemoteClock

MS = 1_000_000
AHEAD = st.integers(-(10**18), 10**18)
DELAY = st.integers(0, 500 * MS)


@given(AHEAD, st.lists(st.tuples(DELAY, DELAY), min_size=1, max_size=40))
def test_error_is_at_most_half_the_quickest_round_trip(ahead_ns: int, delays: list[tuple[int, int]]) -> None:
    """Whatever their clock says, and however uneven the way there and back."""
    clock, now_ns = RemoteClock(), 10**18
    for there_ns, back_ns in delays:
        clock.observe(now_ns, now_ns + there_ns + ahead_ns, now_ns + there_ns + back_ns)
        now_ns += 1000 * MS
    stamp_ns = now_ns - 5 * 1000 * MS
    error_ns = abs(clock.here_ns(stamp_ns + ahead_ns, now_ns) - stamp_ns)
    assert error_ns <= min(there + back for there, back in delays[-NUM_BEATS:]) // 2 + 1
    assert clock.round_trip_ns == min(there + back for there, back in delays[-NUM_BEATS:])


def test_a_slow_beat_after_quick_ones_changes_nothing() -> None:
    """A queue on the way must not move all stamps."""
    clock = RemoteClock()
    clock.observe(0, 1000 * MS + 1 * MS, 2 * MS)
    before = clock.here_ns(1500 * MS, 10**12)
    clock.observe(2000 * MS, 3000 * MS + 900 * MS, 2900 * MS)
    assert clock.here_ns(1500 * MS, 10**12) == before


def test_nothing_is_stamped_in_the_future() -> None:
    """What is told has happened."""
    clock = RemoteClock()
    clock.observe(0, 0, 100 * MS)
    assert clock.here_ns(99 * MS, 100 * MS) == 100 * MS


@given(st.integers(0, 2**32))
def test_waits_grow_to_a_bound_and_vary(seed: int) -> None:
    """Each is at most twice as long as the one before could be, and never more than the bound."""
    backoff = Backoff(0.1, 5.0, seeded(seed))
    waits = [backoff.next_s() for _ in range(100)]
    for number, wait_s in enumerate(waits):
        whole_s = min(5.0, 0.1 * 2**number)
        assert whole_s / 2 <= wait_s <= whole_s
    assert len(set(waits)) > 50
