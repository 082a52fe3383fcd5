"""The runbooks' commands work as written: started from the alert's label, on a run that fires the alert, they name
the culprit.

Two runs lie side by side, so that the commands have to find the right one. The crash loop, the flapping run and the run
on slow storage are recorded from real launchers (tests/recordings; the rules alert on the same runs in
tests/promtool), the others are told (tests/stories). A command that stands on many pages runs once a run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_sre.events.codec import to_dict
from nvrx_sre.events.schema import FaultClass, Layer, Phase, RestoredFrom
from nvrx_sre.monitoring import assets, runbooks
from nvrx_sre.monitoring.alerts import alert_rules
from nvrx_sre.monitoring.values import Values
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
CULPRITS = {
    "NvrxCrashLooping": [r"rank 1\tstep 20\texception\t\S*InjectedError", "cap same_fingerprint reached: 3 of 3"],
    "NvrxRunHalted": [r"rank 1\tstep 20\texception\t\S*InjectedError", "exit 93"],
    "NvrxRecoveryOverdue": [r"rank 1\tstep 11\tkilled", r"rank 1\tload"],
    "NvrxRunStalled": [r"rank 0\tstep\n", r"rank 1\tdata\n"],
    "NvrxRendezvousStuck": [r"rank 0\trendezvous\n", r"rank 1\tinit\n"],
    "NvrxStartupOverdue": [r"rank 1\tinit\n"],
    "NvrxRetryCapBreached": [r"(generation \d.*\n.*){5}", r"rank 1\tstep 11\texception"],
    "NvrxTargetMissing": [r"no answer", r"rank 1\tstep 11\tkilled"],
    "NvrxLauncherStuck": [r"no such process here"],
    "NvrxCheckpointStale": [r"SaveFailed .*no_space"],
    "NvrxGoodputBurn": [r"rank 1\tstep 11\texception", r"detect"],
}
"""Alert -> what the output of its page must say about the injected culprit."""
_DONE: dict[tuple[str, str], str] = {}


def root_of(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory of two runs; the one that the alert is about, by its name."""
    source = RECORDED.get(name) or TOLD[name].__name__
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
    return [head, *(json.dumps(to_dict(record)) for record in TOLD[name]().records)]


def write(directory: Path, run: str, journal: list[str]) -> None:
    """A run directory with the files that outlive a launcher."""
    for part in ("journal", "logs", "checkpoints", "epochs"):
        (directory / part).mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"run": run}))
    (directory / "logs" / "launcher.log").write_text("the launcher's last words\n")
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
    root, run = root_of(name, tmp_path_factory)
    output = ""
    for block in runbooks.diagnosis(assets.runbook_text(name)):
        key = (str(root), block)
        if key not in _DONE:
            _DONE[key] = shell(block, root, run)
        output += _DONE[key]
    assert f"{root}/dir-of-{run}\n" in output
    for culprit in CULPRITS[name]:
        assert re.search(culprit, output), f"{culprit} is not in:\n{output}"


def test_every_critical_page_is_tried() -> None:
    """A new page needs a culprit here."""
    assert sorted(CULPRITS) == CRITICAL
