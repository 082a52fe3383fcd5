"""Output of rank 0 is shown as it comes, also when the rank moves to another process."""

from __future__ import annotations

import threading
from pathlib import Path

from nvrx_sre.cli.follow import RankOutput
from nvrx_sre.launcher.rundir import RunDirectory


def test_output_follows_the_rank_to_its_new_process(tmp_path: Path) -> None:
    """Old output of an earlier start is not repeated; both processes' new output is shown, in order."""
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    first, second = directory.logs / "rank-00000-attempt-0000-1.log", directory.logs / "standby-attempt-0000-4.log"
    first.write_text("old\n")
    directory.point_rank_log(0, first)
    shown: list[str] = []
    moved = threading.Event()

    def write(text: str) -> None:
        shown.append(text)
        moved.set()

    with RankOutput(directory.rank_log(0), write):
        with first.open("a") as file:
            file.write("one\n")
        assert moved.wait(30)
        second.write_text("two\n")
        directory.point_rank_log(0, second)
    assert "".join(shown) == "one\ntwo\n"


def test_a_log_to_which_the_link_comes_back_is_not_shown_again(tmp_path: Path) -> None:
    """The earlier start ended with rank 0 in a standby; this start appends to the log of the first process."""
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    first, second = directory.logs / "rank-00000-attempt-0000-1.log", directory.logs / "standby-attempt-0000-4.log"
    first.write_text("ValueError: since fixed\n")
    second.write_text("old\n")
    directory.point_rank_log(0, second)
    shown: list[str] = []
    with RankOutput(directory.rank_log(0), shown.append):
        directory.point_rank_log(0, first)
        with first.open("a") as file:
            file.write("new\n")
    assert "".join(shown) == "new\n"


def test_a_missing_log_is_no_error(tmp_path: Path) -> None:
    """Nothing to follow yet is the normal state at a start."""
    shown: list[str] = []
    with RankOutput(tmp_path / "rank-00000.log", shown.append):
        pass
    assert shown == []
