"""Signals that end a wait of the launcher when its run is over."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from nvrx_sre.launcher.signals import WATCHED, ended_by_signals


@pytest.mark.parametrize("number", WATCHED)
def test_any_watched_signal_ends_a_wait_quietly(number: signal.Signals) -> None:
    """Also one that is ignored, as SIGINT is in the background of a script; afterwards all is as it was."""
    before = signal.signal(number, signal.SIG_IGN)
    passed = threading.Event()
    try:
        with ended_by_signals():
            os.kill(os.getpid(), number)
            passed.wait(60)
            passed.set()
        assert not passed.is_set()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
