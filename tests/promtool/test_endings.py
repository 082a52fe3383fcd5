"""A page that is cured fires once more and says how it ended; nothing else about it changes."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from nvrx_sre.monitoring import generate, promtool
from nvrx_sre.telemetry import catalog
from tests.promtool.fleet import END, Run, case_of, jump
from tests.promtool.histories import BEGIN, HELD, LOOP
from tests.promtool.test_alert_rules import QUICK

INTERVAL_S = 30
OUTAGE = {(catalog.OUTAGE_LAST.name,): 1.2, (catalog.ROLLBACK_LAST.name,): 1}
STANDING = {(catalog.LAUNCHER_LOOP.name,): lambda at: at if at < 600 or at >= 1_200 else 600}
UNSAVED = {(catalog.CHECKPOINT_CAPTURED.name, "durable"): jump(2_400, 600, 2_340)}
GONE = (("old", 0, 600), ("new", 1_200, END))


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A page, the run that it is about, the moment of its cure, and what it says then."""

    alert: str
    run: Run
    at_s: int
    how: str


def ended(alert: str, run: Run, at_s: int, how: str) -> Ending:
    """One line of the table below."""
    return Ending(alert=alert, run=run, at_s=at_s, how=how)


RECOVERED = "recovered in 1.2s, rollback 1 step"
ENDINGS = [
    ended("NvrxCrashLooping", Run("a", [*LOOP, (1_200, "progress")], levels=OUTAGE), 1_200, RECOVERED),
    ended("NvrxCrashLooping", Run("b", [*LOOP, (840, "halted"), (1_200, "start")]), 1_200, "submitted again"),
    ended("NvrxRunHalted", Run("c", [*LOOP, (721, "halted"), (1_200, "start")]), 1_200, "submitted again"),
    ended(
        "NvrxRecoveryOverdue", Run("d", [*BEGIN, (600, "fault"), (1_860, "progress")], levels=OUTAGE), 1_860, RECOVERED
    ),
    ended(
        "NvrxRecoveryOverdue",
        Run("e", [*BEGIN, (600, "fault"), (1_860, "redo")]),
        1_860,
        "steps are executed again, the incident is still open",
    ),
    ended("NvrxRunStalled", Run("f", [*BEGIN, (600, "stop"), (1_200, "advance")]), 1_200, "steps are executed again"),
    ended(
        "NvrxRunStalled", Run("g", [*BEGIN, (600, "stop"), (1_200, "fault")]), 1_200, "a fault was detected after all"
    ),
    ended(
        "NvrxRendezvousStuck",
        Run("h", [*BEGIN, (600, "rendezvous"), (1_200, "restoring")]),
        1_200,
        "the group has formed: 4 ranks",
    ),
    ended("NvrxStartupOverdue", Run("i", [(60, "start"), (1_860, "train")]), 1_860, "the first step was executed"),
    ended("NvrxStartupOverdue", Run("j", [(60, "start"), (1_860, "fault")]), 1_860, "a fault was detected"),
    ended("NvrxTargetMissing", Run("k", BEGIN, pods=GONE), 1_200, "it answers again"),
    ended("NvrxLauncherStuck", Run("l", BEGIN, levels=STANDING), 1_200, "its loop turns again"),
    ended("NvrxCheckpointStale", Run("m", BEGIN, levels=UNSAVED), 2_400, "a checkpoint of 1m 0s ago is verified"),
]
"""`NvrxRetryCapBreached` says one thing only; `NvrxGoodputBurn` says for how long it fired."""


@pytest.fixture(scope="module")
def said() -> dict[tuple[str, int, str], str]:
    """(alert, moment, run) -> what it says of its end, while it fires; around the cure."""
    asked = {(item.alert, at) for item in ENDINGS for at in moments(item)}
    case = case_of("ends", [item.run for item in ENDINGS], (), max(at for _, at in asked))
    text = promtool.alert_text(generate.rules_file(QUICK), case, INTERVAL_S, *asked)
    found = {}
    for part in re.split(r"(?=alertname: )", text)[1:]:
        head = re.match(r"alertname: (\w+), time: (\S+),", part)
        assert head is not None, part[:200]
        alert, at = head.groups()
        for run, how in re.findall(r'run="(\w+)".*?resolved="([^"]*)"', part, re.DOTALL):
            found[alert, seconds_of(at), run] = how
    return found


def moments(ending: Ending) -> tuple[int, int, int]:
    """When it is looked at."""
    return ending.at_s - 60, ending.at_s, ending.at_s + 60


def seconds_of(text: str) -> int:
    """Go's duration in seconds."""
    units = {"h": 3_600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda item: f"{item.alert}-{item.run.name}")
def test_a_page_that_is_cured_says_how(ending: Ending, said: dict[tuple[str, int, str], str]) -> None:
    """While it fires it says nothing of its end; at its cure it says how; a minute later it is over, or held with the
    same words."""
    before, then, after = (said.get((ending.alert, at, ending.run.name)) for at in moments(ending))
    assert (before, then) == ("", ending.how)
    assert after == (ending.how if ending.alert in HELD else None)
