"""The runbooks' commands work as written: started from the alert's label, on a run that fires the alert, they name
the culprit.

Two runs lie side by side, so that the commands have to find the right one. The crash loop is recorded from a real
launcher (tests/recordings; the rules alert on the same run in tests/promtool), the others are told (tests/stories); the
pages that wake somebody run against live launchers as well (test_monitoring_runbooks_real). A command that stands on
many pages runs once a run. Tickets share one run that has every trouble.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from nvrx_sre.events.codec import to_dict
from nvrx_sre.events.schema import (
    FaultClass,
    HaltReason,
    Layer,
    Phase,
    RankExcluded,
    RejectReason,
    RestoredFrom,
    SaveFailure,
    TelemetryDegraded,
)
from nvrx_sre.monitoring import assets, runbooks
from nvrx_sre.monitoring.alerts import alert_rules
from nvrx_sre.monitoring.alerts_kubernetes import STUCK_REASONS
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry.labels import Component
from tests.stories import RUN, Story, begin

RECORDINGS = Path(__file__).resolve().parent.parent / "recordings"
CRITICAL = sorted({rule.name for rule in alert_rules(Values()) if rule.severity == "critical"})


def open_incident() -> Story:
    """Rank 1 was killed at step 11; its successor does not come past the load of the checkpoint."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.fault(12.9, 13.0, FaultClass.KILLED, 1, layer=Layer.WORKER)
    story.torn_down(13.2)
    story.phase(13.3, Phase.LOAD, (0, 1))
    return story


def stalled() -> Story:
    """Rank 1 waits for data, rank 0 for rank 1."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.phase(12.5, Phase.STEP, (0,))
    story.phase(12.5, Phase.DATA, (1,))
    return story


def missing_rank() -> Story:
    """Rank 0 is in the rendezvous, rank 1 never left its start."""
    story = Story()
    story.start(0.0)
    story.phase(2.0, Phase.RENDEZVOUS, (0,))
    return story


def endless() -> Story:
    """Generation after generation, and a budget that somebody refilled."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    for index in range(6):
        story.fault(13.0 + index, 13.1 + index, FaultClass.EXCEPTION, 1)
        story.form(13.5 + index, 10, RestoredFrom.HOT)
    return story


def unsaved() -> Story:
    """A save at step 10, none after it."""
    story, begin_s = begin()
    story.steps(begin_s, 12.4, 1, 10)
    story.save(12.5, 10)
    story.steps(12.4, 60.0, 11, 60)
    story.fail_save(61.0, 60)
    return story


def troubled() -> Story:
    """What tickets are about: no room for a save, a damaged checkpoint, six faults of a rank, a device excluded."""
    story = endless()
    story.save(21.0, 10)
    story.fail_save(22.0, 10)
    story.reject(23.0, 10)
    story.add(24.0, RankExcluded(device="n1/1", reason="a device fault too many", world_size=1), 1)
    begin_s = story.form(25.0, 0, RestoredFrom.FRESH, world=1)
    story.steps(begin_s, 30.0, 1, 12)
    story.add(31.0, TelemetryDegraded(component="otlp", dropped=3, errors=1))
    return story


TOLD: dict[str, Callable[[], Story]] = {
    "NvrxRecoveryOverdue": open_incident,
    "NvrxRunStalled": stalled,
    "NvrxRendezvousStuck": missing_rank,
    "NvrxStartupOverdue": missing_rank,
    "NvrxRetryCapBreached": endless,
    "NvrxTargetMissing": open_incident,
    "NvrxLauncherStuck": stalled,
    "NvrxCheckpointStale": unsaved,
    "NvrxGoodputBurn": endless,
}
RECORDED = {"NvrxCrashLooping": "crash_loop", "NvrxRunHalted": "crash_loop"}
LAST_WORDS = "the launcher's last words"
CULPRITS = {
    "NvrxCrashLooping": [r"rank 1\tstep 20\texception\t\S*InjectedError", "cap same_fingerprint reached: 3 of 3"],
    "NvrxRunHalted": [r"rank 1\tstep 20\texception\t\S*InjectedError", "exit 93"],
    "NvrxRecoveryOverdue": [r"rank 1\tstep 11\tkilled", r"rank 1\tload"],
    "NvrxRunStalled": [r"rank 0\tstep\n", r"rank 1\tdata\n", "said by rank 1"],
    "NvrxRendezvousStuck": [r"rank 0\trendezvous\n", r"rank 1\tinit\n", "said by rank 1", LAST_WORDS],
    "NvrxStartupOverdue": [r"rank 1\tinit\n", "said by rank 1"],
    "NvrxRetryCapBreached": [r"(generation \d.*\n.*){5}", r"rank 1\tstep 11\texception"],
    "NvrxTargetMissing": [r"no answer", r"rank 1\tstep 11\tkilled"],
    "NvrxLauncherStuck": [r"no such process here", LAST_WORDS],
    "NvrxCheckpointStale": [r"SaveFailed .*no_space", "said by the writer"],
    "NvrxGoodputBurn": [r"rank 1\tstep 11\texception", r"detect"],
}
"""Alert -> what the output of its page must say about the injected culprit."""
FAULTS = r"rank 1\tstep 11\texception\tRuntimeError\ttrain.py:7 train\tn1/0"
EXCLUDED = r"RankExcluded .*n1/1"
REJECTED = r"CheckpointRejected .*truncated"
NO_ENDPOINT = "no answer"
TICKETS = {
    "NvrxCatalogMismatch": [r'"nvrx_sre":"0"'],
    "NvrxCheckpointRejected": [REJECTED],
    "NvrxCheckpointSaturated": [r"SaveCommitted .*step=10 "],
    "NvrxCheckpointSaveFailing": [r"SaveFailed .*no_space", "said by the writer"],
    "NvrxClockSkew": [r"UTC", "TelemetryDegraded", NO_ENDPOINT],
    "NvrxDeviceUnfit": [r"n1/1\ta device fault too many\tworld 1", r"6 n1/0 rank 1 exception", NO_ENDPOINT],
    "NvrxFlapping": [FAULTS, r"6 exception n1/0 train.py:7 train"],
    "NvrxHostMemoryPressure": [r"PID +RSS", NO_ENDPOINT, FAULTS],
    "NvrxLauncherPodFailing": [r"IncidentClosed .*exception on rank 1 at step 11"],
    "NvrxRecoveredDegraded": [r"RolledBack .*step=10 ", EXCLUDED, REJECTED, FAULTS],
    "NvrxRepeatedDeviceFault": [r"6 n1/0 rank 1 exception", FAULTS, EXCLUDED],
    "NvrxRetryBudgetLow": [FAULTS, r"RestartDecided .*because"],
    "NvrxScrapesMissing": [NO_ENDPOINT, "no such process here"],
    "NvrxSilentFreshStart": [r"resumed false\tfresh false", r"StateRestored .*starting from step 0", REJECTED],
    "NvrxSlowRank": ["said by rank 1"],
    "NvrxStandbyMissing": ["said by a standby", "Mem:"],
    "NvrxStepTimeRegressed": [r"\t12\t", r"GenerationFormed .*1 rank"],
    "NvrxStorageNearFull": [r"Use%", r"dir-of-demo/journal"],
    "NvrxTelemetryDropping": [r"TelemetryDegraded .*otlp", r"telemetry: otlp failed, .*refused"],
    "NvrxUnknownProgress": [r"0 damaged lines", FAULTS],
    "NvrxWatchdog": [r"does not answer", r"dir-of-demo"],
    "NvrxWorldShrunk": [EXCLUDED, r"1 rank", FAULTS],
}
"""The same of alerts that wake nobody, on `troubled`."""
SAID = {
    "rank-00000.log": "said by rank 0",
    "rank-00001.log": "said by rank 1",
    "writer-epoch-0014-attempt-0000-3.log": "said by the writer",
    "standby-epoch-0014-attempt-0000-4.log": "said by a standby",
    "launcher.log": "\n".join(
        [
            json.dumps({"event": "telemetry: otlp failed, training goes on: refused", "level": "warning"}),
            json.dumps({"event": "StepsCommitted", "level": "debug", "message_text": "not worth a line"}),
            LAST_WORDS,
        ]
    ),
} | {
    f"{role}-epoch-{epoch:04d}-attempt-0000-{child}.log": "of an earlier launcher\n" * 19
    for epoch in range(1, 14)
    for role, child in (("writer", 3), ("standby", 4))
}
"""Log -> what stands in it. Launchers before wrote more than a page shows."""
_DONE: dict[tuple[str, str], str] = {}


def root_of(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory of two runs; the one that the alert is about, by its name."""
    source = RECORDED.get(name) or TOLD.get(name, troubled).__name__
    root = tmp_path_factory.getbasetemp() / f"runs-{source}"
    run = RECORDED.get(name, RUN)
    if not root.exists():
        write(root / "dir-of-other", "other", [json.dumps({"schema": 1, "run": "other", "epoch": 1})])
        write(root / f"dir-of-{run}", run, journal_of(name))
    return root, run


def journal_of(name: str) -> list[str]:
    """Lines of the journal of the run that fires the alert."""
    if name in RECORDED:
        return (RECORDINGS / f"{RECORDED[name]}.jsonl").read_text().splitlines()
    head = json.dumps({"schema": 1, "run": RUN, "epoch": 1})
    return [head, *(json.dumps(to_dict(record)) for record in TOLD.get(name, troubled)().records)]


def write(directory: Path, run: str, journal: list[str]) -> None:
    """A run directory with the files that outlive a launcher."""
    for part in ("journal", "logs", "checkpoints", "epochs"):
        (directory / part).mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"run": run}))
    for log, said in SAID.items():
        (directory / "logs" / log).write_text(f"{said}\n")
    (directory / "metrics.json").write_text(
        json.dumps({"url": "http://127.0.0.1:9/metrics", "pid": 4_194_305, "run": run})
    )
    (directory / "journal" / "00000001-000001.jsonl").write_text("\n".join(journal) + "\n")


def shell(block: str, root: Path, run: str) -> str:
    """Output of one block of a page, started from the alert's label; each runs in a shell of its own."""
    find = runbooks.diagnosis(assets.runbook_text("NvrxCrashLooping"))[0] if "RUN_DIR=$(" not in block else ""
    found = f"RUN_DIR='{root}/dir-of-{run}'\nRUN={run}\nRUNS='{root}'\n" if find else ""
    text = found + re.sub(r"^RUN=demo ", f"RUN={run} ", block, flags=re.MULTILINE)
    text = re.sub(r"^RUNS=runs ", f"RUNS='{root}' ", text, flags=re.MULTILINE)
    program = f'nvrx-sre() {{ "{sys.executable}" -m nvrx_sre "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program + text], capture_output=True, text=True, check=False, cwd=root,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("name", CRITICAL)
def test_the_page_names_the_culprit(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every block of the diagnosis runs, the first finds the run by its name, and together they name the culprit."""
    names_the_culprit(name, CULPRITS[name], tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("name", TICKETS)
def test_the_page_of_a_ticket_names_the_culprit(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same of alerts that wake nobody, tools that are not there included (kubectl, nvidia-smi)."""
    names_the_culprit(name, TICKETS[name], tmp_path_factory)


def names_the_culprit(name: str, culprits: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """The page's diagnosis says all of `culprits`, and where the run lies."""
    root, run = root_of(name, tmp_path_factory)
    output = ""
    for block in runbooks.diagnosis(assets.runbook_text(name)):
        key = (str(root), block)
        if key not in _DONE:
            _DONE[key] = shell(block, root, run)
        output += _DONE[key]
    assert f"{root}/dir-of-{run}\n" in output or name == "NvrxWatchdog"
    assert "not worth a line" not in output
    for culprit in culprits:
        assert re.search(culprit, output), f"{culprit} is not in:\n{output}"


SETS: dict[str, tuple[Iterable[str], ...]] = {
    "NvrxCheckpointRejected": (RejectReason,),
    "NvrxCheckpointSaveFailing": (SaveFailure,),
    "NvrxCheckpointStale": (SaveFailure,),
    "NvrxLauncherPodFailing": (STUCK_REASONS,),
    "NvrxRunHalted": (HaltReason,),
    "NvrxTelemetryDropping": (Component,),
}
"""Alert -> the closed sets of which its label, or what its diagnosis prints, is one."""


@pytest.mark.parametrize("name", SETS)
def test_a_page_says_what_to_do_for_every_value_of_its_label(name: str) -> None:
    """Nobody is left with a word that the page does not know."""
    text = assets.runbook_text(name).split("## Mitigation")[1].split("## Stop and resume")[0]
    assert [str(value) for values in SETS[name] for value in values if f"`{value}`" not in text] == []


def test_every_critical_page_is_tried() -> None:
    """A new page needs a culprit here."""
    assert sorted(CULPRITS) == CRITICAL
    assert sorted([*CULPRITS, *TICKETS]) == sorted(assets.runbook_names())
