"""When a launcher sends what it has to say: at once, bundled, or with company."""

from __future__ import annotations

from nvrx_sre.core.clock import to_ns
from nvrx_sre.launcher.pace import BUNDLE_S, LIVENESS_S, Pace

NOW_NS = to_ns(100.0)


def test_the_first_word_leaves_at_once() -> None:
    """A fault after a while of silence waits for nothing."""
    pace = Pace()
    assert pace.due_ns is None and not pace.is_due(NOW_NS)
    pace.news(NOW_NS)
    assert pace.is_due(NOW_NS)


def test_what_comes_right_after_a_packet_leaves_together() -> None:
    """However much it is: one packet, `BUNDLE_S` after the last."""
    pace = Pace()
    pace.news(NOW_NS)
    pace.sent(NOW_NS)
    for later_ns in (1, 1000, to_ns(BUNDLE_S) // 2):
        pace.news(NOW_NS + later_ns)
        assert pace.due_ns == NOW_NS + to_ns(BUNDLE_S)


def test_a_sign_of_life_waits_for_company_and_not_for_long() -> None:
    """It is due by itself after a while; with news it leaves with these."""
    pace = Pace()
    pace.sign_of_life(NOW_NS)
    assert pace.due_ns == NOW_NS + to_ns(LIVENESS_S)
    pace.sign_of_life(NOW_NS + to_ns(LIVENESS_S) // 2)
    assert pace.due_ns == NOW_NS + to_ns(LIVENESS_S), "the first one is not put off by the second"
    pace.news(NOW_NS + 7)
    assert pace.due_ns == NOW_NS + 7


def test_what_must_not_wait_does_not() -> None:
    """Also right after a packet; afterwards nothing is due."""
    pace = Pace()
    pace.news(NOW_NS)
    pace.sent(NOW_NS)
    pace.at_once(NOW_NS + 1)
    assert pace.is_due(NOW_NS + 1)
    pace.sent(NOW_NS + 1)
    assert pace.due_ns is None
