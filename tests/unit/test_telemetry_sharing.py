"""One answer for many askers: nobody gets an older one, nobody waits for ever, a failure is one asker's own; what it is
to have been scraped."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from nvrx_sre.telemetry.endpoint import MAX_KEPT, MetricsServer, SharedAnswers

WAIT_S = 30.0


class Maker:
    """Makes numbered answers, each only when it is let."""

    def __init__(self) -> None:
        self.num_made = 0
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def __call__(self) -> bytes:
        self.num_made += 1
        number = self.num_made
        self.begun.release()
        assert self.may_end.acquire(timeout=WAIT_S)
        return str(number).encode()


def ask(answers: SharedAnswers, make: Callable[[], bytes], into: list[bytes], key: str = "text") -> threading.Thread:
    """Ask on a thread of its own."""
    thread = threading.Thread(target=lambda: into.append(answers.get(key, make)))
    thread.start()
    return thread


def wait_for_askers(answers: SharedAnswers, count: int) -> None:
    """Until `count` threads wait for the answer that is being made."""
    while True:
        with answers._changed:
            if len(answers._changed._waiters) >= count:  # type: ignore[attr-defined]  # the condition's own list
                return


def test_all_who_ask_meanwhile_share_the_next_answer() -> None:
    """Twenty askers while one answer is made: one more is made, none gets the one that was begun before."""
    answers, make = SharedAnswers(), Maker()
    first: list[bytes] = []
    others: list[bytes] = []
    threads = [ask(answers, make, first)]
    assert make.begun.acquire(timeout=WAIT_S)
    threads += [ask(answers, make, others) for _ in range(20)]
    wait_for_askers(answers, 20)
    make.may_end.release(2)
    for thread in threads:
        thread.join(WAIT_S)
    assert (first, set(others), len(others)) == ([b"1"], {b"2"}, 20)
    assert make.num_made == 2


def test_an_answer_is_never_older_than_its_question() -> None:
    """One after the other: each gets one of its own."""
    answers, make = SharedAnswers(), Maker()
    make.may_end.release(3)
    assert [answers.get("text", make) for _ in range(3)] == [b"1", b"2", b"3"]


def test_a_failure_is_its_askers_own() -> None:
    """The next one makes another answer."""
    answers = SharedAnswers()

    def fail() -> bytes:
        raise RuntimeError("no answer")

    with pytest.raises(RuntimeError, match="no answer"):
        answers.get("text", fail)
    assert answers.get("text", lambda: b"good") == b"good"


def test_what_is_kept_is_bounded() -> None:
    """Whatever forms are asked for."""
    answers = SharedAnswers()
    for number in range(100):
        assert answers.get(f"form {number}", lambda number=number: str(number).encode()) == str(number).encode()
        assert len(answers._answers) <= MAX_KEPT


class Held(Collector):
    """Renders nothing, when it is let."""

    def __init__(self, make: Maker) -> None:
        self._make = make

    def describe(self) -> list[Metric]:
        """Registration must not render."""
        return []

    def collect(self) -> Iterator[Metric]:
        """No series."""
        self._make()
        yield from ()


def test_a_scrape_that_was_asked_for_before_the_end_has_not_seen_it() -> None:
    """However late it is answered: whoever waits to be scraped waits for one that was asked for afterwards."""
    registry, make = CollectorRegistry(), Maker()
    registry.register(Held(make))
    server = MetricsServer(registry, "127.0.0.1", None, lambda: True, lambda: True)
    server.start()

    def scrape() -> threading.Thread:
        thread = threading.Thread(target=lambda: urllib.request.urlopen(server.url, timeout=WAIT_S).read())
        thread.start()
        assert make.begun.acquire(timeout=WAIT_S)
        return thread

    seen: list[bool] = []
    waiter = threading.Thread(target=lambda: seen.append(server.wait_for_scrapes(1, WAIT_S)))
    try:
        before = scrape()
        waiter.start()
        while server.wait_number == 0:
            pass
        make.may_end.release()
        before.join()
        while server.num_scrapes == 0:  # counted just after the answer was sent
            pass
        assert [item.num_scrapes for item in server._waiters] == [0]
        after = scrape()
        make.may_end.release()
        after.join()
        waiter.join()
        assert seen == [True]
    finally:
        server.close()
