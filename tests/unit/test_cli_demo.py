"""The demo's plan and its promises."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nvrx_sre.cli import demo
from nvrx_sre.cli.main import main
from nvrx_sre.core.errors import ExitCode, RunDirectoryBusy, UserError
from nvrx_sre.core.limits import Deadlines
from nvrx_sre.faults.plan import FaultKind, FaultPlan
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.monitoring.stack import AlertReport


def test_the_plan_fits_the_run() -> None:
    """Every fault can fire, and the kinds are those that the demo promises."""
    plan = FaultPlan.parse(demo.FAULTS)
    plan.check(demo.NUM_RANKS, demo.STEPS)
    assert [spec.kind for spec in plan.specs] == [
        FaultKind.EXCEPTION,
        FaultKind.SIGKILL,
        FaultKind.HANG,
        FaultKind.CORRUPT_CHECKPOINT,
        FaultKind.NODE_KILL,
    ]


def test_the_fallback_is_really_taken() -> None:
    """Between the damage and the node's loss no save is due, and two were due before: the newest is the damaged one."""
    damaged, lost = (spec.step for spec in FaultPlan.parse(demo.FAULTS).specs[-2:])
    assert damaged < lost
    assert damaged // demo.SAVE_EVERY == lost // demo.SAVE_EVERY >= 2


def test_the_demos_deadline_is_a_deadline() -> None:
    """Shorter than the default, so that a person sees the hang found."""
    assert Deadlines().step_s > demo.STEP_DEADLINE_S


def test_an_earlier_demo_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    """What a demo made goes, unless it still runs, as does what is empty; another run, folder, file and a link stay."""
    old = tmp_path / "runs" / "old"
    demo.replace_earlier(old)
    (old / "journal").mkdir()
    link = tmp_path / "link"
    link.symlink_to(old)
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "run.json").write_text("{}")
    plain = tmp_path / "plain"
    plain.touch()
    for place in (link, trained, plain, tmp_path):
        with pytest.raises(UserError, match="was not made by"):
            demo.replace_earlier(place)
    assert (trained / "run.json").exists() and plain.exists() and link.is_symlink()
    demo.replace_earlier(old)
    assert not (old / "journal").exists()
    (empty := tmp_path / "empty").mkdir(mode=0o755)
    demo.replace_earlier(empty)
    assert empty.stat().st_mode & 0o077 == 0, "as private as a directory of its own"
    RunDirectory(old).prepare("demo", {})
    RunDirectory(old).take_epoch()  # this process owns it now
    with pytest.raises(RunDirectoryBusy):
        demo.replace_earlier(old)
    assert (old / "journal").exists()


def test_an_earlier_demo_that_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be somebody else's."""
    demo.replace_earlier(tmp_path / "old")

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(demo.shutil, "rmtree", refuse)
    with pytest.raises(UserError, match="old cannot be used: Permission denied; choose another --run-dir"):
        demo.replace_earlier(tmp_path / "old")


def test_a_directory_that_cannot_be_listed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is empty cannot be known: it is not removed."""
    (place := tmp_path / "private").mkdir()

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match="private cannot be used: Permission denied; choose another --run-dir"):
        demo.replace_earlier(place)
    assert place.is_dir()


def test_a_demo_that_cannot_run_removes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its plan is checked before the earlier one goes."""
    demo.replace_earlier(tmp_path / "old")
    (tmp_path / "old" / "journal").mkdir()
    assert main(["demo", "--run-dir", str(tmp_path / "old"), "--steps", "10"]) == ExitCode.CONFIG
    assert "there is no step 40" in capsys.readouterr().err
    nowhere = str(tmp_path / "nowhere" / "s.json")
    assert main(["demo", "--run-dir", str(tmp_path / "old"), "--summary", nowhere]) == ExitCode.CONFIG
    assert "there is no folder" in capsys.readouterr().err
    assert (tmp_path / "old" / "journal").exists()


def test_alerts_that_fired_and_that_stayed_silent_are_named() -> None:
    """All five lists, `none` where one is empty; a long one goes on below its own names."""
    report = AlertReport(fired=("A",), pending=(), silent=("B", "C", "D"), notified=("A",), paged=())
    assert demo.alert_lines(report, 20) == [
        "pages:         none",
        "alerts fired:  A",
        "notified:      A",
        "only pending:  none",
        "stayed silent: B, C,",
        "               D",
    ]
