"""The brake's decisions over a store in memory, and over run directories."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nvrx_sre.cli.brake import STAMP_FILE, DirectoryStore, address
from nvrx_sre.cli.main import main
from nvrx_sre.core.clock import to_ns
from nvrx_sre.core.errors import StorageError, UsageError, UserError
from nvrx_sre.events.schema import HaltReason
from nvrx_sre.launcher.braking import BrakeConsent, read_consent, write_consent
from nvrx_sre.launcher.reset import reset_budgets
from nvrx_sre.launcher.rundir import RunDirectory
from nvrx_sre.monitoring.brake import CLOCKS_APART_S, MIN_INTERVAL_S, REASONS, Brake, BrakedRun, BrakePolicy, Outcome
from nvrx_sre.testing.clock import ManualClock

NOW_S = 1_700_000_000.0
POLICY = BrakePolicy(alerts=frozenset({"NvrxCrashLooping"}), labels={"cluster": "c1"})


class MemoryStore:
    """A store that keeps what the brake did; `broken` lets one method fail."""

    def __init__(self, *runs: BrakedRun, last_ns: int | None = None, broken: str = "") -> None:
        self.runs = runs
        self.last_ns = last_ns
        self.broken = broken
        self.requests: list[tuple[str, str]] = []

    def _check(self, method: str) -> None:
        if method == self.broken:
            raise StorageError(f"{method} failed")

    def find(self, run: str) -> Sequence[BrakedRun]:
        return [item for item in self.runs if item.run == run]

    def last_halt_ns(self) -> int | None:
        self._check("last_halt_ns")
        return self.last_ns

    def note_halt(self, now_ns: int) -> None:
        self._check("note_halt")
        self.last_ns = now_ns

    def request_halt(self, run: BrakedRun, reason: str) -> None:
        self._check("request_halt")
        self.requests.append((run.directory, reason))


def braked(
    run: str = "demo", *, allowed: bool = True, since_s: float = NOW_S - 3600, halted: bool = False
) -> BrakedRun:
    """A run as its directory describes it."""
    return BrakedRun(
        run=run, directory=f"/runs/{run}", is_allowed=allowed, since_ns=to_ns(since_s), is_halt_requested=halted
    )


def stamp(at_s: float) -> str:
    """Time as Alertmanager writes it."""
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


def alert(status: str = "firing", at_s: float = NOW_S - 60, **labels: str) -> dict[str, Any]:
    """An alert that may halt run `demo`, with changes; an empty label is taken away."""
    base = {"alertname": "NvrxCrashLooping", "action": "halt", "run": "demo", "cluster": "c1", **labels}
    return {
        "status": status,
        "labels": {key: value for key, value in base.items() if value},
        "annotations": {},
        "startsAt": stamp(at_s),
    }


def brake_of(store: MemoryStore, now_s: float = NOW_S) -> Brake:
    """A brake whose time stands still."""
    return Brake(POLICY, store, ManualClock(wall_offset_ns=to_ns(now_s)))


def test_an_alert_that_fits_halts_its_run_once() -> None:
    """The request names the alert and its time; the stamp is taken; a second alert for another run must wait."""
    store = MemoryStore(braked(), braked("other"))
    handled = brake_of(store).handle([alert(), alert(run="other")])
    assert [item.outcome for item in handled] == [Outcome.HALTED, Outcome.TOO_SOON]
    assert store.requests == [("/runs/demo", f"brake: NvrxCrashLooping, firing since {stamp(NOW_S - 60)}")]
    assert store.last_ns == to_ns(NOW_S)


@pytest.mark.parametrize(
    ("given", "runs", "wanted"),
    [
        (alert(status="resolved"), [braked()], Outcome.NOT_FIRING),
        (alert(action=""), [braked()], Outcome.NO_ACTION),
        (alert(action="restart"), [braked()], Outcome.NO_ACTION),
        (alert(alertname="NvrxFlapping"), [braked()], Outcome.NOT_ALLOWED),
        (alert(cluster="c2"), [braked()], Outcome.OTHER_SITE),
        (alert(cluster=""), [braked()], Outcome.OTHER_SITE),
        (alert(run=""), [braked()], Outcome.NO_RUN),
        (alert(run="gone"), [braked()], Outcome.UNKNOWN_RUN),
        (alert(), [braked(), braked()], Outcome.AMBIGUOUS_RUN),
        (alert(), [braked(allowed=False)], Outcome.NOT_OPTED_IN),
        (alert(), [braked(halted=True)], Outcome.ALREADY_HALTED),
        (alert(), [braked(since_s=NOW_S - 59)], Outcome.STALE),
        (alert(), [braked(since_s=NOW_S - 60)], Outcome.STALE),
        (alert(), [braked(since_s=NOW_S - 60 - CLOCKS_APART_S)], Outcome.STALE),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(
    given: dict[str, Any], runs: list[BrakedRun], wanted: Outcome
) -> None:
    """Nothing is written, no stamp is taken, and the outcome says which condition failed."""
    store = MemoryStore(*runs)
    (handled,) = brake_of(store).handle([given])
    assert (handled.outcome, store.requests, store.last_ns) == (wanted, [], None)
    assert handled.reason == REASONS[wanted]


def test_an_alert_counts_once_clocks_that_differ_unnoticed_cannot_explain_it() -> None:
    """By more than what the two may differ by; a run whose clock is that much behind is not halted by an old alert."""
    store = MemoryStore(braked(since_s=NOW_S - 61 - CLOCKS_APART_S))
    (handled,) = brake_of(store).handle([alert()])
    assert (handled.outcome, len(store.requests)) == (Outcome.HALTED, 1)


def test_every_outcome_has_a_reason() -> None:
    """The closed set is explained."""
    assert set(REASONS) == set(Outcome)


@pytest.mark.parametrize("away_s", [-(MIN_INTERVAL_S - 1), MIN_INTERVAL_S - 1])
def test_within_ten_minutes_nothing_is_halted(away_s: float) -> None:
    """Also when the clock was set back."""
    store = MemoryStore(braked(), last_ns=to_ns(NOW_S + away_s))
    assert brake_of(store).handle([alert()])[0].outcome is Outcome.TOO_SOON
    assert store.requests == []


def test_after_ten_minutes_the_brake_acts_again() -> None:
    """The interval is ten minutes and not more."""
    store = MemoryStore(braked(), last_ns=to_ns(NOW_S - MIN_INTERVAL_S))
    assert brake_of(store).handle([alert()])[0].outcome is Outcome.HALTED


@pytest.mark.parametrize("broken", ["last_halt_ns", "note_halt", "request_halt"])
def test_a_disk_that_refuses_is_an_outcome(broken: str) -> None:
    """No halt without its stamp; the sender is to try again."""
    store = MemoryStore(braked(), broken=broken)
    assert brake_of(store).handle([alert()])[0].outcome is Outcome.STORAGE
    assert store.requests == []


@pytest.mark.parametrize("text", [None, "", "yesterday", "2026-01-01T00:00:00", 5])
def test_an_alert_without_its_time_is_not_understood(text: object) -> None:
    """Nothing of the request is acted on, the alerts before it included."""
    store = MemoryStore(braked())
    with pytest.raises(ValueError):
        brake_of(store).handle([alert(), {**alert(), "startsAt": text}])
    assert store.requests == []


# --- run directories ------------------------------------------------------------------------------------------


def run_directory(root: Path, name: str, run: str, consent: BrakeConsent | None = None) -> RunDirectory:
    """A run directory as a launcher leaves it."""
    directory = RunDirectory(root / name)
    directory.prepare(run, {})
    if consent is not None:
        write_consent(directory, consent)
    return directory


def test_run_directories_say_who_opted_in(tmp_path: Path) -> None:
    """By the run's name, not the directory's; without consent, or with a damaged one, nothing is allowed."""
    run_directory(tmp_path, "a", "demo", BrakeConsent(is_allowed=True, since_ns=7))
    silent = run_directory(tmp_path, "b", "silent")
    damaged = run_directory(tmp_path, "c", "damaged")
    (damaged.path / "brake.json").write_text('{"allowed": true, "since_ns": "soon"}')
    store = DirectoryStore(tmp_path)
    (found,) = store.find("demo")
    assert (found.directory, found.is_allowed, found.since_ns) == (str(tmp_path / "a"), True, 7)
    assert [item.is_allowed for name in ("silent", "damaged") for item in store.find(name)] == [False, False]
    assert store.find("a") == []
    assert not found.is_halt_requested
    silent.halt.write_text("{}")
    assert store.find("silent")[0].is_halt_requested


def test_the_stamp_outlives_the_brake_and_is_not_guessed(tmp_path: Path) -> None:
    """Another process reads it; a damaged one is an error, not 'never'."""
    assert DirectoryStore(tmp_path).last_halt_ns() is None
    DirectoryStore(tmp_path).note_halt(42)
    assert DirectoryStore(tmp_path).last_halt_ns() == 42
    (tmp_path / STAMP_FILE).write_text("{")
    with pytest.raises(StorageError, match="cannot be read"):
        DirectoryStore(tmp_path).last_halt_ns()


def test_a_halt_is_what_the_launcher_reads_and_a_resume_lifts_it(tmp_path: Path) -> None:
    """The request lies where `nvrx-sre halt` puts it; after a resume the same alert is of the time before."""
    directory = run_directory(tmp_path, "a", "demo", BrakeConsent(is_allowed=True, since_ns=to_ns(NOW_S - 3600)))
    brake = Brake(BrakePolicy(alerts=POLICY.alerts), DirectoryStore(tmp_path), ManualClock(wall_offset_ns=to_ns(NOW_S)))
    assert brake.handle([alert()])[0].outcome is Outcome.HALTED
    request = directory.halt_request()
    assert request is not None
    assert request[0].startswith("brake: NvrxCrashLooping") and request[1] is HaltReason.BRAKE
    assert brake.handle([alert()])[0].outcome is Outcome.ALREADY_HALTED
    reset_budgets(directory, "demo", "fixed")
    assert not directory.halt.exists()
    assert read_consent(directory).is_allowed
    assert read_consent(directory).since_ns > to_ns(NOW_S)
    (tmp_path / STAMP_FILE).unlink()
    assert brake.handle([alert()])[0].outcome is Outcome.STALE


def test_addresses() -> None:
    """Host and port, IPv6 in brackets; anything else is a usage error."""
    assert address("127.0.0.1:9797") == ("127.0.0.1", 9797)
    assert address("[::1]:0") == ("::1", 0)
    for text in ("9797", ":9797", "host", "host:port", "host:70000", "host:-1"):
        with pytest.raises(UsageError):
            address(text)


def test_a_label_without_value_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One clear line and exit 78."""
    arguments = ["--root", str(tmp_path), "--alert", "A", "--token-file", "t", "--label", "cluster"]
    assert main(["brake", *arguments]) == UserError.exit_code
    assert capsys.readouterr().err == "nvrx-sre: --label 'cluster' is not NAME=VALUE\n"
