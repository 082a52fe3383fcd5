"""Signals that end a wait, whenever they arrive."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest
from prometheus_client import CollectorRegistry

from nvrx_sre.core.signals import WATCHED, SignalPipe
from nvrx_sre.telemetry.endpoint import MetricsServer

OFF_MAIN_THREAD = """
import os, threading
from nvrx_sre.core.signals import SignalPipe

def use():
    before = len(os.listdir("/proc/self/fd"))
    try:
        SignalPipe()
    except ValueError as error:
        print(type(error).__name__, len(os.listdir("/proc/self/fd")) - before)

thread = threading.Thread(target=use)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("number", WATCHED)
def test_a_signal_from_before_a_wait_ends_it(number: signal.Signals) -> None:
    """Also one that is ignored, as SIGINT is in the background of a script; afterwards all is as it was."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with contextlib.closing(SignalPipe()) as signals:
            assert not signals.wait(0)
            os.kill(os.getpid(), number)
            assert signals.wait()
            assert signals.wait(), "it was not received yet"
            assert signals.received() == [number]
            assert not signals.wait(0)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_off_the_main_thread_it_is_refused_and_leaves_nothing() -> None:
    """Python lets no other thread have handlers."""
    done = subprocess.run([sys.executable, "-c", OFF_MAIN_THREAD], capture_output=True, text=True, check=True)
    assert done.stdout == "ValueError 0\n"


def test_a_signal_in_a_wait_ends_it() -> None:
    """Whatever thread the kernel gives it to."""
    with contextlib.closing(SignalPipe()) as signals:
        killer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        killer.start()
        assert signals.wait()
        killer.join()


def test_a_signal_ends_the_wait_for_scrapes_whenever_it_arrives() -> None:
    """Before it began, or in it."""
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", None, lambda: True, lambda: True)
    with contextlib.closing(SignalPipe()) as signals, contextlib.closing(server):
        server.start()
        os.kill(os.getpid(), signal.SIGINT)
        assert not server.wait_for_scrapes(1, 600.0, signals)
        assert signals.received() == [signal.SIGINT]
        killer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        killer.start()
        assert not server.wait_for_scrapes(1, 600.0, signals)
        killer.join()
