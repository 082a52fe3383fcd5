"""What an alert says of its run: whose it is, where it was, what failed, what is durable, what stands idle."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from nvrx_sre.monitoring import generate, promtool
from nvrx_sre.monitoring.promtool import Expectation
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog
from tests.promtool.fleet import KEY, Level, Run, case_of, jump
from tests.promtool.histories import BEGIN, CRASH, HALT, LOOP, MISSING, OVERDUE, RENDEZVOUS, STALLED, STARTUP
from tests.promtool.test_alert_rules import QUICK
from tests.promtool.test_endings import seconds_of

HOUR = 3_600
FRESH = "NvrxSilentFreshStart"
LAST_ROOT = "Last root: rank 3 (exception)."
Events = Sequence[tuple[float, str]]
OWNED = (*KEY, "severity", "team", "priority")
RULES = generate.rules_file(Values())
RANKS: dict[tuple[str, ...], Level] = {(catalog.DEVICES.name, "seen"): 0}
HALTED = [*LOOP, (721, "halted")]
GONE = (("pod-0", 0, 1_000),)
ROOT: dict[tuple[str, ...], Level] = {
    (catalog.FAULT_TIMESTAMP.name, "hang"): jump(120, 0, 300),
    (catalog.FAULT_TIMESTAMP.name, "exception"): jump(600, 0, 600),
    (catalog.FAULT_TIMESTAMP.name, "killed"): 0,
    (catalog.CHECKPOINT_STEP.name, "durable"): 40,
}


def owned(run: Run, severity: str, **whose: str) -> dict[str, str]:
    """Labels of its alert."""
    return {**run.labels(), "severity": severity, **whose}


def test_alerts_carry_whose_run_it_is_also_long_after_its_pod() -> None:
    """Team and priority as the run said; else `none` and `prod`; the same alert when its pod is gone."""
    nlp = Run("nlp", HALTED, team="nlp", pods=GONE)
    dev = Run("dev", HALTED, team="nlp", priority="dev", pods=GONE)
    nobody = Run("nobody", HALTED, pods=GONE)
    unknown = Run("unknown", HALTED, pods=GONE, levels={RUN_INFO: lambda now: None})
    firing = (
        owned(nlp, "critical", team="nlp", priority="prod"),
        owned(dev, "warning", team="nlp", priority="dev"),
        owned(nobody, "critical", team="none", priority="prod"),
        owned(unknown, "critical", team="none", priority="prod"),
    )
    told = tuple(Expectation(at_s=at, alert=HALT, firing=firing) for at in (960, HOUR, 6 * HOUR))
    case = case_of("owners", [nlp, dev, nobody, unknown], told, 6 * HOUR)
    outcome = promtool.run(RULES, [case], 240, OWNED)
    assert outcome.passed, outcome.output


RUN_INFO = (catalog.RUN_INFO.name, "none", "prod", "host-7")


def test_of_two_launchers_the_newer_one_says_whose_run_it_is() -> None:
    """A dev run that is submitted again as prod pages, and a run of the same name elsewhere keeps its own owner."""
    halted = [*BEGIN, (300, "start"), (330, "train"), (600, "fault"), (601, "halted")]
    old = Run("moved", halted, team="research", priority="dev", pods=(("old", 0, 290),))
    new = Run("moved", halted, team="nlp", pods=(("new", 300, 900),))
    other = Run("moved", halted, team="vision", namespace="research", pods=(("pod-0", 0, 900),))
    firing = (
        owned(new, "critical", team="nlp", priority="prod"),
        owned(other, "critical", team="vision", priority="prod"),
    )
    told = tuple(Expectation(at_s=at, alert=HALT, firing=firing) for at in (660, 1_200, 2 * HOUR))
    outcome = promtool.run(RULES, [case_of("moved", [old, new, other], told, 2 * HOUR)], 60, OWNED)
    assert outcome.passed, outcome.output


def test_every_alert_can_be_routed_by_owner() -> None:
    """No rule is left out, nor one that is written later."""
    for text in (RULES, generate.kubernetes_rules_file(Values())):
        rules = [item for item in yaml.safe_load(text)["groups"][0]["rules"] if "alert" in item]
        assert rules
        assert not [item["alert"] for item in rules if not {"severity", "team", "priority"} <= set(item["labels"])]


@dataclass(frozen=True, kw_only=True)
class Saying:
    """What an alert says of a run at a moment. `field`: an annotation."""

    run: Run
    alert: str
    at_s: int
    field: str
    begins: str
    """How the annotation begins; empty: it says nothing at all."""
    holds: str = ""
    lacks: str = "\n"


def says(name: str, alert: str, events: Events, at_s: int, begins: str, **more: Any) -> Saying:
    """One line of the tables below. `more`: fields of the run, `field`, `holds`, `lacks`."""
    told = {key: more.pop(key) for key in ("field", "holds", "lacks") if key in more}
    run = Run(name, events, **more)
    return Saying(run=run, alert=alert, at_s=at_s, begins=begins, **{"field": "description", **told})


def halted_by(reason: str, at_s: float) -> dict[tuple[str, ...], Level]:
    """A halt for one reason."""
    stamps: dict[tuple[str, ...], Level] = {(catalog.HALTED_TIMESTAMP.name, each): 0 for each in ("cap", "operator")}
    return {**ROOT, **stamps, (catalog.HALTED_TIMESTAMP.name, reason): jump(at_s, 0, at_s)}


def idle(name: str, alert: str, events: Events, at_s: int, held: str, **more: Any) -> Saying:
    """What it says of devices."""
    return says(f"idle-{name}", alert, events, at_s, held, field="idle", **more)


FAULT = [*BEGIN, (600, "fault"), (660.658, "halted")]
WHY = {
    "cap": "Retries are used up. Last root: rank 3 (exception). The launcher ends with exit code 93: ",
    "incurable": "No restart can cure the fault. Last root: rank 3 (exception). The launcher ends with exit code 93: ",
    "operator": "An operator halted it. The launcher ends with exit code 93: ",
    "brake": "The brake halted it. The launcher ends with exit code 93: ",
}
UNSAVED: dict[tuple[str, ...], Level] = {(catalog.CHECKPOINT_STEP.name, "durable"): -1}
LOST: dict[tuple[str, ...], Level] = {(catalog.FRESH_STARTS.name, "lost"): jump(580, 0, 1)}
SAVED: dict[tuple[str, ...], Level] = {**LOST, (catalog.SAVES.name, "durable", "committed"): 3}
REDOES, SHRUNK = [*BEGIN, (570, "fault"), (580, "redo")], {(catalog.WORLD_SIZE.name,): 3}
ALONE, STOPPED = {(catalog.WORLD_SIZE_CONFIGURED.name,): 1}, (("pod-0", 0, 600),)
SAYINGS = [
    says("loops", CRASH, LOOP, 840, f"{LAST_ROOT} Attempts", levels=ROOT, holds="durable step: 40.", lacks="halted"),
    says("loops-later", CRASH, LOOP, 2_340, LAST_ROOT, levels=ROOT, holds="looks busy"),
    says("loops-unsaved", CRASH, LOOP, 840, "Last root: ", levels=UNSAVED, holds="No step is durable.", lacks="Newest"),
    says("halted", CRASH, HALTED, 840, LAST_ROOT, levels=ROOT, holds="has been halted since", lacks="looks busy"),
    says("halted-gone", HALT, HALTED, 2_340, "Retries", levels=ROOT, holds=f"{LAST_ROOT} The", pods=GONE),
    says("halted-saved", HALT, HALTED, 2_340, "Retries", levels=ROOT, holds="Newest durable step: 40.", pods=GONE),
    *(
        says(f"by-{reason}", HALT, FAULT, 840, text, levels=halted_by(reason, 660.658), lacks="operator or")
        for reason, text in WHY.items()
    ),
    *(
        says(
            f"since-{reason}",
            HALT,
            FAULT,
            840,
            f"Run since-{reason} is halted ({reason}) since 1970-01-01 00:11:00 UTC and will not restart.",
            field="summary",
            levels=halted_by(reason, 660.658),
        )
        for reason in WHY
    ),
    says("vanished", MISSING, BEGIN, 2_340, "Its launcher was on host-7. ", pods=STOPPED),
    says("fresh", FRESH, BEGIN, 840, "No checkpoint was durable yet: the steps before", levels=LOST, lacks="retention"),
    says("fresh-saved", FRESH, BEGIN, 840, "No checkpoint was loaded.", levels=SAVED, holds="before retention"),
    idle("loop", CRASH, LOOP, 840, "4 GPUs held"),
    idle("loop-on-cpu", CRASH, LOOP, 840, "4 ranks held", levels=RANKS),
    idle("loop-of-one", CRASH, LOOP, 840, "1 GPU held", levels=ALONE),
    idle("halted-loop", CRASH, HALTED, 840, ""),
    idle("halted", HALT, HALTED, 840, ""),
    idle("stalled", STALLED, [*BEGIN, (600, "stop")], 1_200, "4 GPUs held"),
    idle("overdue", OVERDUE, [*BEGIN, (600, "fault")], 2_340, "4 ranks held", levels=RANKS),
    idle("rendezvous", RENDEZVOUS, [*BEGIN, (600, "rendezvous")], 1_200, "4 GPUs held"),
    idle("starting", STARTUP, [(60, "start")], 2_340, "4 GPUs held"),
    idle("shrunk", "NvrxWorldShrunk", BEGIN, 1_200, "", levels=SHRUNK),
    idle("redoing", FRESH, REDOES, 840, "", levels=LOST),
    idle("vanished", MISSING, BEGIN, 1_200, "", pods=STOPPED),
]


@pytest.fixture(scope="module")
def texts() -> dict[tuple[str, str, int], str]:
    """(run, alert, moment) -> labels and annotations, all of them side by side."""
    asked = {(item.alert, item.at_s) for item in SAYINGS}
    case = case_of("texts", [item.run for item in SAYINGS], (), max(at for _, at in asked) + 60)
    found = {}
    for part in re.split(r"(?=alertname: )", promtool.alert_text(generate.rules_file(QUICK), case, 30, *asked))[1:]:
        head = re.match(r"alertname: (\w+), time: (\S+),", part)
        assert head is not None, part[:200]
        for run, text in re.findall(r'run="([\w-]+)", severity.*?\n\s*Annotations:(.*?)\n', part):
            found[run, head.group(1), seconds_of(head.group(2))] = text
    return found


@pytest.mark.parametrize("item", SAYINGS, ids=lambda item: item.run.name)
def test_a_page_says_what_a_woken_person_needs(item: Saying, texts: dict[tuple[str, str, int], str]) -> None:
    """What failed, what is durable, which one reason; idle is only what is held and trains nothing: not of a run that
    ended, trains, does old steps again, or does not answer."""
    text = texts[item.run.name, item.alert, item.at_s]
    said = re.search(rf'\b{item.field}="([^"]*)"', text)
    assert said is not None, text
    assert said.group(1).startswith(item.begins) and bool(said.group(1)) == bool(item.begins), text
    assert item.holds in said.group(1) and item.lacks not in said.group(1), text
