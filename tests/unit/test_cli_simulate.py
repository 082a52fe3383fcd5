"""`nvrx-sre simulate`: what it prints, what it returns, and that a failing seed can be shown again."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from nvrx_sre.cli import simulate
from nvrx_sre.cli.main import main
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events.codec import from_dict
from nvrx_sre.launcher.machine_saves import Saves
from nvrx_sre.testing import scaling
from nvrx_sre.testing.simulation import RARE_STATES


def test_a_sound_swarm_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Counts; three seeds are not expected to reach what is rare."""
    assert main(["simulate", "--seeds", "3", "--ranks", "4"]) == 0
    said = capsys.readouterr().out
    assert "3 seeds, 0 failed" in said
    assert "rare states reached" in said and "not reached" not in said


def test_what_enough_seeds_never_reached_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line each for what is rare, not for the rarest, which takes more of them."""
    monkeypatch.setattr(simulate, "SEEDS_FOR_RARE", 2)
    assert main(["simulate", "--seeds", "2", "--ranks", "2"]) == 0
    missing = re.findall(r"not reached: (.*)", capsys.readouterr().out)
    assert missing and set(missing) <= set(RARE_STATES)


def test_json_is_the_same_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Journals by their digest, for any comparison between machines and releases."""
    texts = []
    for _ in range(2):
        assert main(["simulate", "--seeds", "2", "--seed", "5", "--ranks", "4", "--hosts", "2", "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    summary = json.loads(texts[0])
    assert set(summary["journals"]) == {"5", "6"}
    assert summary["failed"] == []


def test_a_failing_seed_tells_how_to_show_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command it prints fails with the same problems; the exit code says that the defect is ours."""
    release = Saves._release

    def released_too_early(self: Saves, save: object, now_ns: int) -> None:
        hand_over(self, save, now_ns)  # type: ignore[arg-type]  # a private class of the module
        release(self, save)  # type: ignore[arg-type]  # the same

    hand_over = Saves._hand_over
    monkeypatch.setattr(Saves, "_hand_over", released_too_early)
    assert main(["simulate", "--seeds", "4", "--ranks", "4", "--json"]) == ExitCode.INTERNAL
    failed = json.loads(capsys.readouterr().out)["failed"]
    again = shlex.split(failed[0]["repro"])
    assert again[0] == "nvrx-sre"
    assert main(again[1:]) == ExitCode.INTERNAL
    said = capsys.readouterr().out
    assert failed[0]["problems"][0] in said
    assert failed[0]["repro"] in said


def test_the_journal_of_a_seed_can_be_read(tmp_path: Path) -> None:
    """One record a line, as a run's journal has them."""
    path = tmp_path / "journal.jsonl"
    assert main(["simulate", "--seeds", "1", "--ranks", "2", "--journal", str(path)]) == 0
    records = [from_dict(json.loads(line)) for line in path.read_text().splitlines()]
    assert type(records[-1].event).__name__ == "LauncherStopped"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["--ranks", "2", "--hosts", "4"], ExitCode.CONFIG, "at most one host a rank"),
        (["--ranks", "20000"], ExitCode.USAGE, "--ranks"),
        (["--seeds", "1", "--ranks", "1", "--journal", "/nowhere/j"], ExitCode.CONFIG, "there is no folder /nowhere;"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    arguments: list[str], exit_code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What, where, and the exit code of a user's error."""
    assert main(["simulate", *arguments]) == exit_code
    assert text in capsys.readouterr().err


def test_store_messages_grow_with_hosts_not_with_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Packets of a recovery: linear in hosts; on four hosts they hardly grow with the ranks; decisions stay one."""
    assert main(["simulate", "--scaling", "--ranks", "256", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert [row["num_decisions"] for row in measured["rows"]] == [1] * 8
    assert measured["growth"]["packets_by_hosts"] < 1.1
    assert measured["growth"]["bytes_by_hosts"] < 1.1
    assert measured["growth"]["packets_by_ranks_at_fixed_hosts"] < 0.4
    assert measured["growth"]["inputs_by_ranks"] < 1.1
    [*_, row] = measured["rows"]
    assert row["num_packets"] < 60 * row["num_hosts"], "eight ranks a host say a dozen things each"


def test_growth_is_the_slope_of_the_larger_half() -> None:
    """Squares have exponent two, whatever the smallest sizes do; a constant has none."""
    assert scaling.growth([(1, 50), (2, 50), *((x, x * x) for x in (4, 8, 16, 32))]) == pytest.approx(2.0)
    assert scaling.growth([(x, 7) for x in (2, 4, 8, 16)]) == pytest.approx(0.0)
