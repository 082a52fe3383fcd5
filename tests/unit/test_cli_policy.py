"""`nvrx-sre policy explain`: a sequence of faults, and a run's journal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvrx_sre.cli.main import main
from nvrx_sre.cli.policy import OF_PLANNED, happened
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Event, FaultClass, Record
from nvrx_sre.faults.plan import FaultKind
from nvrx_sre.policy.rehearsal import Rehearsal, World


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """The rows."""
    assert main(["policy", "explain", *arguments, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_deterministic_fault_is_stopped_at_the_third(capsys: pytest.CaptureFixture[str]) -> None:
    """Attempt, decision, layer, what is left: one row each."""
    rows = explained(capsys, "exception@1:37x5")
    assert [(row["attempt"], row["decision"], row["layer"], row["exit_code"]) for row in rows] == [
        (1, "restart", "in_process", None),
        (2, "restart", "worker", None),
        (3, "stop", "job", 93),
    ]
    assert [row["left"]["same_fingerprint"] for row in rows] == [2, 1, 0]


def test_progress_refills(capsys: pytest.CaptureFixture[str]) -> None:
    """Between faults with progress nothing adds up."""
    rows = explained(capsys, *["killed", "progress"] * 6)
    assert [row["attempt"] for row in rows] == [1] * 6


def test_waits_and_time_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Back-offs pass as they are told, `+SECONDS` on top."""
    rows = explained(capsys, "killed", "killed", "+300", "killed", "--every", "1")
    assert [row["when"] for row in rows] == ["1 s", "2 s", "308 s"]
    assert [row["backoff_s"] for row in rows] == [0.0, 5.0, 0.0]


def test_resume_goes_on_after_preemptions(capsys: pytest.CaptureFixture[str]) -> None:
    """Planned faults are understood by their own names."""
    rows = explained(capsys, "sigtermx3", "resume", "sigterm")
    assert [(row["fault"], row["attempt"], row["exit_code"]) for row in rows] == [
        ("preemption", attempt, 143) for attempt in (1, 2, 3, 1)
    ]


def test_exclusion_names_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    """With room for it the third blames the device."""
    rows = explained(capsys, "killed@1x3", "--nproc", "4", "--min-world-size", "2", "--world-multiple", "2")
    assert [row["excluded"] for row in rows] == ["", "", "node/1"]


def test_caps_of_a_config_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a run would do with its own file, options of the run included."""
    config = tmp_path / "run.toml"
    config.write_text("[run]\nname = 'x'\n[caps]\nsame_fingerprint_attempts = 5\nconsecutive_attempts = 5\n")
    rows = explained(capsys, "exceptionx9", "--config", str(config))
    assert [row["decision"] for row in rows] == ["restart"] * 4 + ["stop"]


def test_a_full_cap_that_waits_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is left and yet it restarts: the reason says from when on caps count, and how long it has been."""
    rows = explained(capsys, *["killed"] * 4, "+300", "killed")
    waits = "caps count from 300 s without progress on"
    assert [row["reason"].partition(";")[0] for row in rows] == [
        "killed: first attempt since progress",
        "killed: attempt 2 without progress, no cap reached",
        "killed: attempt 3 without progress",
        "killed: attempt 4 without progress",
        "cap same_fingerprint reached: 5 of 3 without progress",
    ]
    assert [row["left"]["consecutive"] for row in rows[2:4]] == [0, 0]
    assert f"; {waits} (25 s so far); " in rows[2]["reason"]
    assert f"; {waits} (65 s so far); " in rows[3]["reason"]


def test_what_is_piped_has_a_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """A program reads it, or a person with `less -S`: nothing wraps, however long a reason is."""
    assert main(["policy", "explain", *["killed"] * 4]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["when", "fault", "attempt", "decision", "layer", "back-off", "left", "why"]
    assert [line.split()[2] for line in lines] == ["killed@0"] * 4
    assert lines[-1].rstrip().endswith("so far); from an older checkpoint")


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is in it."""
    assert main(["policy", "explain", "user_error"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "stop, exit 78" in shown
    assert "back-off" in shown


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["gremlin"], 2, "'gremlin' is neither a fault"),
        (["killed@7"], 2, "rank 7 is none of 2 ranks: say how many there are with --nproc"),
        (["killedx99999"], 2, "explain at most 10000 faults"),
        (
            ["killed", "--nproc", "4", "--min-world-size", "3", "--world-multiple", "2"],
            78,
            "use a multiple of the unit",
        ),
        (["./nowhere"], 78, "nowhere is not there"),
    ],
)
def test_what_cannot_be_explained_is_said(
    arguments: list[str], exit_code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and the exit code of the cause."""
    assert main(["policy", "explain", *arguments]) == exit_code
    assert message in capsys.readouterr().err


def test_every_planned_fault_has_a_class_or_disturbs_nobody() -> None:
    """Kinds that only slow down, or hit the writer or the launcher, are no fault of a rank."""
    known = {kind for kind in FaultKind if kind in OF_PLANNED or kind.value in list(FaultClass)}
    assert set(FaultKind) - known == {
        FaultKind.SLOW,
        FaultKind.SLOW_STORAGE,
        FaultKind.WRITER_KILL,
        FaultKind.LAUNCHER_KILL,
        FaultKind.NO_SPACE,
        FaultKind.IO_ERROR,
    }


def recorded(*events: tuple[Event, int | None]) -> list[Record]:
    """A journal of these (event, rank), a second apart."""
    return [
        Record(run="r", epoch=1, generation=1, rank=rank, seq=seq, time_ns=seq * 1_000_000_000, event=event)
        for seq, (event, rank) in enumerate(events, 1)
    ]


def test_journal_tells_decisions_that_no_fault_led_to() -> None:
    """Preemptions at their cap, halts and resumes stand between the faults."""
    decision = Rehearsal(CapLimits(), World(num_ranks=2, min_world_size=1)).fault(FaultClass.KILLED)
    rows = list(
        happened(
            recorded(
                (decision.event(), None),
                (schema.RankExcluded(device="n/1", reason="r", world_size=1), 1),
                (schema.PreemptionReceived(signal=15, by_person=False, attempts=20, limit=20), None),
                (schema.PreemptionReceived(signal=2, by_person=True), None),
                (schema.HaltRequested(reason="loss spike"), None),
                (schema.BudgetReset(reason="looked at it"), None),
            )
        )
    )
    assert [(row.fault, row.decision, row.exit_code, row.excluded) for row in rows] == [
        ("unknown", "restart", None, "n/1"),
        ("preemption", "stop", 93, ""),
        ("preemption", "stop", 130, ""),
        ("halt by operator", "stop", 93, ""),
        ("resume", "refill", None, ""),
    ]
    assert rows[0].when == "1970-01-01 00:00:01"
