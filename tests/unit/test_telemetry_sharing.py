"""One answer for many askers: nobody gets an older one, nobody waits for ever, a failure is one asker's own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from nvrx_sre.telemetry.endpoint import MAX_KEPT, SharedAnswers

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
