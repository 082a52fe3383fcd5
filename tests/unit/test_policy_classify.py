"""Fault classes: from exit codes, signals and reports."""

from __future__ import annotations

import pytest

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.messages import Fault
from nvrx_sre.events.schema import FaultClass, Layer
from nvrx_sre.policy.classify import RULES, RetryClass, classify_exit, classify_report, fingerprint


def report(fault: str, *, communication: bool = False) -> Fault:
    return Fault(
        generation=1,
        fault=fault,
        communication=communication,
        exception_type="E",
        frame="f",
        message="",
        stack="",
        step=1,
        phase="step",
        mono_ns=0,
    )


@pytest.mark.parametrize(
    ("exit_code", "signal", "oom", "before", "expected"),
    [
        (None, 9, False, False, FaultClass.KILLED),
        (None, 9, True, False, FaultClass.OOM_KILL),
        (None, 11, False, True, FaultClass.KILLED),
        (None, 7, False, False, FaultClass.SHM_EXHAUSTED),
        (1, None, False, True, FaultClass.STARTUP),
        (1, None, False, False, FaultClass.EXCEPTION),
        (0, None, False, False, FaultClass.OTHER),
        (0, None, False, True, FaultClass.USER_ERROR),
        (ExitCode.USAGE, None, False, True, FaultClass.USER_ERROR),
        (ExitCode.CONFIG, None, False, False, FaultClass.USER_ERROR),
        (127, None, False, False, FaultClass.STARTUP),
    ],
)
def test_exit_classes(exit_code: int | None, signal: int | None, oom: bool, before: bool, expected: FaultClass) -> None:
    """Each way to die has its class; before the first step ever a failure is one of start-up."""
    assert classify_exit(exit_code, signal, oom, before) is expected


def test_every_class_has_a_rule() -> None:
    """The table is total, and stops are the only classes whose first layer is the job."""
    assert set(RULES) == set(FaultClass)
    at_job = {kind for kind, rule in RULES.items() if rule.first_layer is Layer.JOB}
    assert at_job == {kind for kind, rule in RULES.items() if rule.retry in (RetryClass.USER, RetryClass.NONE)}


@pytest.mark.parametrize("kind", list(FaultClass))
def test_reports_keep_their_own_class(kind: FaultClass) -> None:
    """A rank's own classification is taken over."""
    assert classify_report(report(kind.value)) is kind


def test_unknown_report_is_other() -> None:
    """A class outside the closed set never becomes a label."""
    assert classify_report(report("gremlins")) is FaultClass.OTHER


def test_communication_errors_are_collective() -> None:
    """Whatever the rank called it, an error of communication is the collective's."""
    assert classify_report(report("exception", communication=True)) is FaultClass.COLLECTIVE_ERROR


def test_fingerprints_tell_faults_apart() -> None:
    """Class, type, frame and step all count; equal ones give equal fingerprints."""
    base = (FaultClass.EXCEPTION, "ValueError", "a.py:1 f", 7)
    others = [
        (FaultClass.OTHER, "ValueError", "a.py:1 f", 7),
        (FaultClass.EXCEPTION, "KeyError", "a.py:1 f", 7),
        (FaultClass.EXCEPTION, "ValueError", "a.py:2 f", 7),
        (FaultClass.EXCEPTION, "ValueError", "a.py:1 f", 8),
    ]
    marks = {fingerprint(*item) for item in [base, *others]}
    assert len(marks) == 5
    assert fingerprint(*base) == fingerprint(*base)
