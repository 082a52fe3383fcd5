"""What `monitor` watches and shows, without a server."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nvrx_sre.cli.main import main
from nvrx_sre.cli.monitor import MAX_RESTING_SHOWN, Shown, View, alert_table, changes, news, shown_alerts
from nvrx_sre.cli.watched import SEEN_AGAIN_S, Endpoint, Watched, read_endpoint
from nvrx_sre.core import processes
from nvrx_sre.core.clock import seconds, to_ns
from nvrx_sre.core.errors import UserError
from nvrx_sre.launcher.host import node_name
from nvrx_sre.launcher.rundir import read_json
from nvrx_sre.monitoring import query
from nvrx_sre.monitoring.alerts import alert_rules, over_with_run
from nvrx_sre.monitoring.stack import LOCAL_LABELS, ScrapeAccess, ScrapeTarget
from nvrx_sre.monitoring.values import Values
from nvrx_sre.testing.clock import ManualClock
from tests.certificates import make_certificate

NO_ACCESS = ScrapeAccess()


def serve(directory: Path, pid: int, port: int = 9400, host: str = "127.0.0.1", ticks: int | None = None) -> Path:
    """A run directory whose launcher holds the first epoch and says where it serves."""
    (directory / "epochs").mkdir(parents=True, exist_ok=True)
    began = processes.start_ticks(pid) if ticks is None else ticks
    holder = {"node": "n", "pid": pid, "start_ticks": began, "boot_id": processes.boot_id()}
    (directory / "epochs" / "00000001.json").write_text(json.dumps(holder))
    where = {"url": f"http://{host}:{port}/metrics", "pid": pid, "run": directory.name}
    (directory / "metrics.json").write_text(json.dumps(where))
    return directory


@pytest.fixture
def dead_pid() -> int:
    """A process id that was real and is gone."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def watch(
    directories: list[Path], root: Path | None, clock: ManualClock | None = None, scrape_interval_s: float = 5.0
) -> Watched:
    """As `monitor` does, at a clock of the test's own."""
    return Watched(directories, root, clock or ManualClock(), scrape_interval_s=scrape_interval_s)


def settled(watched: Watched) -> set[tuple[str, str]]:
    """What a turn takes to be over."""
    watched.refresh()
    return watched.settled()


def urls(watched: Watched) -> list[str]:
    """What is scraped at the next turn."""
    return [item.url for item in watched.refresh()]


def test_new_runs_and_restarted_launchers_appear(tmp_path: Path) -> None:
    """Below the root at any time, and under the newest address."""
    watched = watch([], tmp_path)
    assert urls(watched) == []
    serve(tmp_path / "a", os.getpid(), 1)
    serve(tmp_path / "b", os.getpid(), 2)
    assert urls(watched) == ["http://127.0.0.1:1/metrics", "http://127.0.0.1:2/metrics"]
    serve(tmp_path / "a", os.getpid(), 3)
    assert urls(watched) == ["http://127.0.0.1:3/metrics", "http://127.0.0.1:2/metrics"]


def test_a_given_directory_is_watched_once(tmp_path: Path) -> None:
    """Also when it lies below the root."""
    serve(tmp_path / "a", os.getpid(), 1)
    assert urls(watch([tmp_path / "a"], tmp_path)) == ["http://127.0.0.1:1/metrics"]


def test_a_launcher_that_died_stays_and_one_that_ended_goes(tmp_path: Path, dead_pid: int) -> None:
    """The rules must see that a target is missing; a run that ended in order is not missing."""
    directory = serve(tmp_path / "a", os.getpid(), 1)
    watched = watch([directory], None)
    (alive,) = watched.refresh()
    serve(directory, dead_pid, 1)
    watched._known = {directory: Endpoint(run="a", directory=directory, url=alive.url, pid=dead_pid)}
    assert urls(watched) == ["http://127.0.0.1:1/metrics"]
    (directory / "summary.json").write_text("{}")
    assert urls(watched) == []


def test_what_was_dead_before_never_appears(tmp_path: Path, dead_pid: int) -> None:
    """A directory of last week names a port that may be somebody else's now."""
    serve(tmp_path / "a", dead_pid)
    assert urls(watch([], tmp_path)) == []


def test_a_process_id_that_somebody_else_has_now_is_no_launcher(tmp_path: Path) -> None:
    """In a container the same few numbers come again: the process must have begun when the launcher did."""
    serve(tmp_path / "a", os.getpid(), ticks=processes.start_ticks(os.getpid()) - 1)
    assert urls(watch([], tmp_path)) == []


def test_addresses_and_labels(tmp_path: Path) -> None:
    """An endpoint on all addresses is scraped on loopback; damage is none; the namespace is the parent's name."""
    directory = serve(tmp_path / "site" / "a", os.getpid(), 1, "0.0.0.0")
    endpoint = read_endpoint(directory)
    assert endpoint is not None
    assert endpoint.url == "http://127.0.0.1:1/metrics"
    assert endpoint.target().labels == {**LOCAL_LABELS, "namespace": "site"}
    for content in ("", "[]", '{"url": 5}', '{"url": "http://h:port/", "pid": 1, "run": "a"}'):
        (directory / "metrics.json").write_text(content)
        assert read_endpoint(directory) is None
    assert read_endpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("url", "password", "why"),
    [
        ("https://127.0.0.1:1/metrics", False, "its endpoint has TLS: give --metrics-ca"),
        ("http://127.0.0.1:1/metrics", True, "its endpoint has a password: give --metrics-user and its file"),
        ("https://127.0.0.1:1/metrics", True, "its endpoint has TLS and a password: give --metrics-ca, --metrics-user"),
        ("http://10.0.0.1:1/metrics", True, "its password would be sent in the clear"),
    ],
)
def test_an_endpoint_that_is_locked_is_said_to_be_not_scraped(
    tmp_path: Path, url: str, password: bool, why: str
) -> None:
    """Neither asked in vain nor passed over in silence; an open one is scraped."""
    where = {"url": url, "pid": os.getpid(), "run": "a", "password": password}
    (serve(tmp_path, os.getpid()) / "metrics.json").write_text(json.dumps(where))
    endpoint = read_endpoint(tmp_path)
    assert endpoint is not None
    assert endpoint.unscraped_because(NO_ACCESS).startswith(why)
    assert alert_table([endpoint], [], NO_ACCESS).row_count == 1
    opened = read_endpoint(serve(tmp_path / "b", os.getpid()))
    assert opened is not None
    assert opened.unscraped_because(NO_ACCESS) == ""
    assert alert_table([endpoint, opened], [], NO_ACCESS).row_count == 2

    stack, output = SiteStub(), io.StringIO()
    view = View(Console(file=output, width=200), NO_ACCESS, ManualClock())
    view.turn(stack, watch([tmp_path, tmp_path / "b"], None))  # type: ignore[arg-type]  # a stub of the two servers
    assert [target.url for target in stack.targets] == [opened.url]
    assert f"not watching a ({url}): {why}" in output.getvalue()


def test_with_its_keys_a_locked_endpoint_is_scraped(tmp_path: Path) -> None:
    """TLS by the CA, a password by its file; the one without a password is not sent it; never in the clear."""
    (tmp_path / "password").write_text("s3cret")
    (tmp_path / "password").chmod(0o600)
    ca = make_certificate(tmp_path).certificate
    access = ScrapeAccess(ca=ca, user="prom", password=tmp_path / "password")
    where = {"pid": os.getpid(), "run": "a"}
    found = {}
    for url, password in (("https://h:1/metrics", True), ("https://h:1/metrics", False), ("http://h:1/metrics", True)):
        (tmp_path / "metrics.json").write_text(json.dumps({**where, "url": url, "password": password}))
        endpoint = read_endpoint(tmp_path)
        assert endpoint is not None
        found[url, password] = (endpoint.unscraped_because(access), endpoint.target().has_password)
    assert found == {
        ("https://h:1/metrics", True): ("", True),
        ("https://h:1/metrics", False): ("", False),
        ("http://h:1/metrics", True): ("its password would be sent in the clear", True),
    }


class SiteStub:
    """Takes targets; Prometheus does not answer."""

    prometheus_url = "http://127.0.0.1:9"

    def __init__(self) -> None:
        self.targets: list[ScrapeTarget] = []

    def set_targets(self, targets: list[ScrapeTarget]) -> None:
        """What is to be scraped."""
        self.targets = targets


def alert(name: str, severity: str, state: str = "firing", run: str = "demo") -> dict[str, Any]:
    """An alert as Prometheus' API gives it."""
    labels = {"alertname": name, "severity": severity, "run": run, "namespace": "runs"}
    return {"state": state, "labels": labels, "annotations": {"summary": f"{run}: {name}"}}


def test_the_most_urgent_comes_first_and_the_watchdog_is_not_shown() -> None:
    """Firing before pending, critical before warning before info."""
    given = [
        alert("NvrxWatchdog", "info"),
        alert("NvrxScrapesMissing", "info"),
        alert("NvrxSlowRank", "warning"),
        alert("NvrxRunStalled", "critical", "pending"),
        alert("NvrxRunHalted", "critical"),
    ]
    shown = ["NvrxRunHalted", "NvrxSlowRank", "NvrxScrapesMissing", "NvrxRunStalled"]
    assert [item.alert for item in shown_alerts(given)] == shown


SEE = "See: nvrx-sre runbook NvrxRunHalted"


def test_changes_are_told_once() -> None:
    """A line when an alert begins to fire and one when it ceases; pending and unchanged ones say nothing."""
    first = shown_alerts([alert("NvrxRunHalted", "critical"), alert("NvrxSlowRank", "warning", "pending")])
    assert changes([], first) == [f"firing critical NvrxRunHalted namespace=runs run=demo: demo: NvrxRunHalted {SEE}"]
    assert changes(first, first) == []
    second = shown_alerts([alert("NvrxRunHalted", "critical", run="other")])
    assert changes(first, second) == [
        f"firing critical NvrxRunHalted namespace=runs run=other: other: NvrxRunHalted {SEE}",
        "resolved critical NvrxRunHalted namespace=runs run=demo",
    ]


def test_a_line_says_culprit_progress_and_how_it_ended() -> None:
    """What the annotations say at the first evaluation, and at the last."""
    halted = alert("NvrxRunHalted", "critical")
    halted["annotations"] |= {"culprit": "rank 1 on node-b", "progress": "last new step 9s ago", "resolved": ""}
    [began] = changes([], shown_alerts([halted]))
    assert f": demo: NvrxRunHalted (culprit rank 1 on node-b; last new step 9s ago) {SEE}" in began
    halted["annotations"]["resolved"] = "submitted again"
    last = shown_alerts([halted])
    assert changes(last, []) == ["resolved critical NvrxRunHalted namespace=runs run=demo: submitted again"]


def test_what_another_alert_holds_back_says_so() -> None:
    """Of the same run and while it fires: that is what Alertmanager tells of."""
    loop = alert("NvrxCrashLooping", "critical")
    both = {item.alert: item for item in shown_alerts([loop, alert("NvrxRunHalted", "critical")])}
    assert both["NvrxCrashLooping"].text == "demo: NvrxCrashLooping [held back by NvrxRunHalted]"
    assert both["NvrxRunHalted"].held_back_by == ""
    for other in (alert("NvrxRunHalted", "critical", "pending"), alert("NvrxRunHalted", "critical", run="other")):
        assert not any(item.held_back_by for item in shown_alerts([loop, other]))


def test_a_ticket_that_becomes_a_page_is_told() -> None:
    """One name, two severities: the second line is not the first one's."""
    ticket = shown_alerts([alert("NvrxGoodputBurn", "warning")])
    both = shown_alerts([alert("NvrxGoodputBurn", "warning"), alert("NvrxGoodputBurn", "critical")])
    [line] = changes(ticket, both)
    assert line.startswith("firing critical NvrxGoodputBurn ")


def test_lines_have_a_time_and_say_why_a_run_is_not_watched_any_more(tmp_path: Path) -> None:
    """It ended: no word that sounds as if it had yet to come."""
    output, clock, site = io.StringIO(), ManualClock(), SiteStub()
    view, watched = View(Console(file=output, width=200), NO_ACCESS, clock), watch([], tmp_path)
    view.turn(site, watched)  # type: ignore[arg-type]  # the part of a stack that it needs
    directory = serve(tmp_path / "a", os.getpid())
    clock.advance(61.0)
    view.turn(site, watched)  # type: ignore[arg-type]
    serve(directory, os.getpid(), ticks=1)
    (directory / "summary.json").write_text(json.dumps({"exit_code": 93}))
    view.turn(site, watched)  # type: ignore[arg-type]
    began = datetime.fromtimestamp(seconds(ManualClock().wall_ns()), UTC)
    later = f"{began + timedelta(seconds=61):%Y-%m-%d %H:%M:%S}Z"
    assert output.getvalue().splitlines() == [
        f"{began:%Y-%m-%d %H:%M:%S}Z watching no run yet",
        f"{later} watching a (http://127.0.0.1:9400/metrics)",
        f"{later} not watching a any more: it ended with exit 93",
        f"{later} watching no run",
    ]


def test_the_table_says_when_all_is_quiet() -> None:
    """An empty table would look like a broken one; quiet is only what is looked at."""
    assert alert_table([], [], NO_ACCESS).row_count == 1
    assert list(alert_table([], [], NO_ACCESS).columns[4].cells) == ["no run is there to be watched"]
    watched = Endpoint(run="r", directory=Path("r"), url="http://127.0.0.1:1/metrics", pid=1)
    assert list(alert_table([watched], [], NO_ACCESS).columns[4].cells) == ["nothing fires"]
    locked = dataclasses.replace(watched, has_password=True)
    [cell] = alert_table([locked], [], NO_ACCESS).columns[4].cells
    assert str(cell).startswith("not scraped, ")
    shown = Shown(state="firing", alert="A", namespace="n", run="r", severity="critical", summary="s")
    assert alert_table([watched], [shown, shown], NO_ACCESS).row_count == 2


def test_what_is_no_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Before a server is started."""
    assert main(["monitor", str(tmp_path)]) == UserError.exit_code
    assert "is not a run directory" in capsys.readouterr().err


def test_a_password_that_others_can_read_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One line that says what to do, before a server is started."""
    (tmp_path / "password").write_text("s3cret")
    (tmp_path / "password").chmod(0o644)
    given = ["--metrics-user", "prom", "--metrics-password-file", str(tmp_path / "password")]
    assert main(["monitor", "--root", str(tmp_path), *given]) == UserError.exit_code
    assert "can be read by others: chmod 600" in capsys.readouterr().err


def follow(directory: Path, rank: int, epoch: int, host: str = "127.0.0.1", node: str | None = None) -> None:
    """A follower of that epoch says where it serves."""
    where = {"url": f"http://{host}:{9400 + rank}/metrics", "pid": 1, "run": directory.name, "password": False}
    where |= {"node": node_name() if node is None else node, "epoch": epoch}
    (directory / f"metrics-{rank:05d}.json").write_text(json.dumps(where))


def test_followers_of_the_newest_leader_are_scraped_beside_it(tmp_path: Path) -> None:
    """Not those of an earlier epoch, whose port is not theirs any more, and none of a run whose leader is not there."""
    directory = serve(tmp_path / "runs" / "a", os.getpid())
    follow(directory, 1, epoch=1)
    follow(directory, 2, epoch=0)
    watched = watch([directory], None)
    assert urls(watched) == ["http://127.0.0.1:9400/metrics", "http://127.0.0.1:9401/metrics"]
    assert [item.target().labels["namespace"] for item in watched.refresh()] == ["runs", "runs"]
    (directory / "epochs" / "00000002.json").write_text((directory / "epochs" / "00000001.json").read_text())
    assert urls(watched) == ["http://127.0.0.1:9400/metrics"], "the new leader's followers have not joined yet"
    follow(directory, 1, epoch=2)
    assert len(urls(watched)) == 2
    serve(directory, os.getpid(), ticks=1)
    (directory / "epochs" / "00000002.json").unlink()
    follow(directory, 1, epoch=1)
    assert urls(watch([directory], None)) == []


def test_a_follower_on_another_host_is_scraped_there_or_said_not_to_be(tmp_path: Path) -> None:
    """On all addresses: under its host's name. On that host's loopback: a line says what to give its launcher."""
    directory = serve(tmp_path / "a", os.getpid())
    follow(directory, 1, epoch=1, host="0.0.0.0", node="node-b")
    follow(directory, 2, epoch=1, node="node-c")
    _, reachable, hidden = watch([directory], None).refresh()
    assert reachable.url == "http://node-b:9401/metrics"
    assert (reachable.unscraped_because(NO_ACCESS), hidden.unscraped_because(NO_ACCESS)) == (
        "",
        "node node-c serves on its loopback: give its launcher --metrics-host",
    )


def end(directory: Path, exit_code: int, pid: int) -> Path:
    """The launcher of that run has ended with this exit code, and left its summary last."""
    serve(directory, pid, ticks=1)
    (directory / "summary.json").write_text(json.dumps({"exit_code": exit_code}))
    return directory


def start_again(directory: Path, ahead_s: float = 0.0) -> None:
    """A launcher that runs has written where it serves, on a storage whose clock is so far ahead of ours."""
    serve(directory, os.getpid())
    began_ns = time_of(directory / "summary.json") + to_ns(1.0 + ahead_s)
    os.utime(directory / "metrics.json", ns=(began_ns, began_ns))


def time_of(path: Path) -> int:
    """When the storage says that it was written."""
    return path.stat().st_mtime_ns


def test_alerts_that_tell_why_a_run_ended_outlive_it() -> None:
    """All others of a run ask whether it has ended: their own rules say so."""
    names = {rule.name for rule in alert_rules(Values())}
    assert names - over_with_run(Values()) == {"NvrxRunHalted", "NvrxCrashLooping", "NvrxWatchdog"}


@pytest.mark.parametrize(
    ("exit_code", "is_news"), [(0, False), (78, False), (93, False), (130, False), (143, False), (70, True), (75, True)]
)
def test_a_run_that_ended_in_order_is_not_missing(tmp_path: Path, dead_pid: int, exit_code: int, is_news: bool) -> None:
    """Unless it waits to be started again: that nobody does is what the alert is for."""
    directory = end(tmp_path / "runs" / "demo", exit_code, dead_pid)
    over = settled(watch([directory], None))
    told = [alert("NvrxTargetMissing", "critical"), alert("NvrxCheckpointStale", "critical", "pending")]
    assert news(told, over, over_with_run(Values())) == (told if is_news else [])


def test_why_a_run_ended_and_what_fires_of_others_stays(tmp_path: Path, dead_pid: int) -> None:
    """The halt and the loop of the ended one, and everything of a run of another name or namespace."""
    over = settled(watch([], end(tmp_path / "runs" / "demo", 93, dead_pid).parent))
    assert over == {("runs", "demo")}
    kept = [
        alert("NvrxRunHalted", "critical"),
        alert("NvrxCrashLooping", "critical"),
        alert("NvrxTargetMissing", "critical", run="other"),
    ]
    elsewhere = alert("NvrxTargetMissing", "critical")
    elsewhere["labels"]["namespace"] = "elsewhere"
    gone = alert("NvrxScrapesMissing", "info")
    assert news([*kept, gone, elsewhere], over, over_with_run(Values())) == [*kept, elsewhere]


@pytest.mark.parametrize(("scrape_interval_s", "held_back_s"), [(5.0, SEEN_AGAIN_S), (45.0, 135.0)])
def test_a_run_that_was_started_again_is_news_once_it_was_seen(
    tmp_path: Path, dead_pid: int, scrape_interval_s: float, held_back_s: float
) -> None:
    """A scrape and an evaluation must have had the time to end what fired before."""
    directory, clock = end(tmp_path / "runs" / "demo", 0, dead_pid), ManualClock()
    watched = watch([], directory.parent, clock, scrape_interval_s)
    assert settled(watched) == {("runs", "demo")}
    start_again(directory)
    clock.advance(held_back_s - 1)
    assert settled(watched) == {("runs", "demo")}
    clock.advance(1)
    assert settled(watched) == set()
    end(directory, 75, dead_pid)
    assert settled(watched) == set()


def test_an_end_that_asks_for_a_restart_is_news_at_once(tmp_path: Path, dead_pid: int) -> None:
    """Although the run was over a moment ago: now somebody is to start it again."""
    directory = end(tmp_path / "runs" / "demo", 93, dead_pid)
    watched = watch([directory], None)
    assert settled(watched) == {("runs", "demo")}
    start_again(directory)
    assert settled(watched) == {("runs", "demo")}
    (directory / "summary.json").write_text(json.dumps({"exit_code": 75}))
    os.utime(directory / "summary.json", ns=(time_of(directory / "metrics.json"),) * 2)
    assert settled(watched) == set()


def test_a_live_run_is_news_whatever_the_clock_of_the_storage_says(tmp_path: Path, dead_pid: int) -> None:
    """Its files may be of next year: how long we have seen it is told by our own clock."""
    directory, clock = end(tmp_path / "runs" / "demo", 93, dead_pid), ManualClock()
    start_again(directory, ahead_s=1e9)
    assert settled(watch([directory], None, clock)) == set(), "it ran when we came: nothing fired before"
    end(directory, 93, dead_pid)
    os.utime(directory / "metrics.json", (0, 0))
    watched = watch([directory], None, clock)
    assert settled(watched) == {("runs", "demo")}
    start_again(directory, ahead_s=1e9)
    clock.advance(SEEN_AGAIN_S)
    assert settled(watched) == set()


def test_a_run_that_was_killed_and_a_twin_that_runs_are_news(tmp_path: Path, dead_pid: int) -> None:
    """A launcher without a summary; of two directories with one key, the one that runs."""
    directory, clock = end(tmp_path / "runs" / "demo", 0, dead_pid), ManualClock()
    watched = watch([], directory.parent, clock)
    assert settled(watched) == {("runs", "demo")}
    twin = serve(tmp_path / "runs" / "twin", os.getpid())
    (twin / "metrics.json").write_text((twin / "metrics.json").read_text().replace('"twin"', '"demo"'))
    assert settled(watched) == set()
    (directory / "summary.json").unlink()
    (twin / "metrics.json").unlink()
    clock.advance(SEEN_AGAIN_S)
    assert settled(watched) == set()


def test_a_turn_reads_each_file_once(tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a terminal, which shows what does not run: a site has hundreds of ended runs, and a turn each second."""
    end(tmp_path / "a", 93, dead_pid)
    output, read = io.StringIO(), list[str]()

    def note(path: Path) -> Any:
        read.append(path.name)
        return read_json(path)

    monkeypatch.setattr("nvrx_sre.cli.watched.read_json", note)
    monkeypatch.setattr(query, "alerts", lambda _: [])
    console = Console(file=output, width=200, force_terminal=True)
    with View(console, NO_ACCESS, ManualClock()) as view:
        view.turn(SiteStub(), watch([], tmp_path))  # type: ignore[arg-type]  # the part of a stack that it needs
    assert sorted(read) == ["metrics.json", "summary.json"]
    assert "has ended (exit 93)" in output.getvalue()


def test_what_fires_of_a_run_whose_end_no_scrape_saw_is_not_told(
    tmp_path: Path, dead_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as a line nor in the table, where the same alert of a launcher that was killed is."""
    told = [alert("NvrxTargetMissing", "critical"), alert("NvrxTargetMissing", "critical", run="killed")]
    monkeypatch.setattr(query, "alerts", lambda _: told)
    directory, killed = (serve(tmp_path / "runs" / name, os.getpid()) for name in ("demo", "killed"))
    watched, output = watch([], tmp_path / "runs"), io.StringIO()
    watched.refresh()
    end(directory, 0, dead_pid)
    serve(killed, os.getpid(), ticks=1)
    View(Console(file=output, width=200), NO_ACCESS, ManualClock()).turn(SiteStub(), watched)  # type: ignore[arg-type]
    assert [line for line in output.getvalue().splitlines() if "firing" in line] == [
        line for line in output.getvalue().splitlines() if "run=killed: " in line
    ]
    assert "run=killed: " in output.getvalue()


def first_look(watched: Watched) -> list[str]:
    """Lines of the first turn, without their time."""
    output = io.StringIO()
    View(Console(file=output, width=200), NO_ACCESS, ManualClock()).turn(SiteStub(), watched)  # type: ignore[arg-type]
    return [line.split("Z ", 1)[1] for line in output.getvalue().splitlines()]


def test_a_run_that_has_ended_is_said_to_have(tmp_path: Path, dead_pid: int) -> None:
    """Nobody waits for it as for one that has yet to begin; once it is started again it is watched."""
    directory = end(tmp_path / "train", 0, dead_pid)
    watched = watch([directory], None)
    assert first_look(watched) == ["train has finished (exit 0)", "watching no run until one is started"]
    (directory / "summary.json").unlink()
    serve(directory, os.getpid())
    assert urls(watched) == ["http://127.0.0.1:9400/metrics"]


def test_what_does_not_run_is_said_of_what_was_named_or_if_nothing_runs(tmp_path: Path, dead_pid: int) -> None:
    """The runs below a root only where none of them runs, and then not all of a hundred."""
    halted = end(tmp_path / "a", 93, dead_pid)
    died = serve(tmp_path / "b", dead_pid, ticks=1)
    holder = json.loads((died / "epochs" / "00000001.json").read_text())
    far = serve(tmp_path / "c", dead_pid, ticks=1)
    (died / "epochs" / "00000001.json").write_text(json.dumps({**holder, "node": node_name()}))
    assert first_look(watch([halted, died, far], None))[:3] == [
        "b does not run: its launcher died and left no exit code",
        "c cannot be seen from here: its launcher is, or was, on n",
        "a has ended (exit 93)",
    ]
    for number in range(MAX_RESTING_SHOWN):
        end(tmp_path / f"d{number}", 0, dead_pid)
    lines = first_look(watch([], tmp_path))
    assert len(lines) == MAX_RESTING_SHOWN + 2 and lines[-2] == "3 more do not run"
    serve(tmp_path / "live", os.getpid())
    assert first_look(watch([], tmp_path)) == ["watching live (http://127.0.0.1:9400/metrics)"]
    assert first_look(watch([halted], tmp_path))[0] == "a has ended (exit 93)"


def test_runs_that_are_not_over_are_told_first_and_all(tmp_path: Path, dead_pid: int) -> None:
    """One whose launcher died among a dozen that ended, wherever its name stands in the order."""
    for number in range(MAX_RESTING_SHOWN + 3):
        end(tmp_path / f"a{number}", 0, dead_pid)
    died = serve(tmp_path / "z", dead_pid, ticks=1)
    holder = json.loads((died / "epochs" / "00000001.json").read_text())
    (died / "epochs" / "00000001.json").write_text(json.dumps({**holder, "node": node_name()}))
    end(tmp_path / "y", 75, dead_pid)
    assert first_look(watch([], tmp_path))[:3] == [
        "y has ended (exit 75)",
        "z does not run: its launcher died and left no exit code",
        "a0 has finished (exit 0)",
    ]
    for number in range(MAX_RESTING_SHOWN):
        end(tmp_path / f"y{number}", 70, dead_pid)
    lines = first_look(watch([], tmp_path))
    assert len(lines) == MAX_RESTING_SHOWN + 4
    assert lines[-3:-1] == [
        "z does not run: its launcher died and left no exit code",
        f"{MAX_RESTING_SHOWN + 3} more do not run",
    ]


def test_the_table_shows_what_does_not_run(tmp_path: Path, dead_pid: int) -> None:
    """In the place of the word that nothing is there, and with a word for each; what was left out is counted."""
    for number in range(MAX_RESTING_SHOWN):
        end(tmp_path / f"a{number}", 0, dead_pid)
    serve(tmp_path / "far", dead_pid, ticks=1)
    died = serve(tmp_path / "died", dead_pid, ticks=1)
    holder = json.loads((died / "epochs" / "00000001.json").read_text())
    (died / "epochs" / "00000001.json").write_text(json.dumps({**holder, "node": node_name()}))
    end(tmp_path / "waits", 75, dead_pid)
    watched = watch([], tmp_path)
    watched.refresh()
    table = alert_table([], [], NO_ACCESS, watched.resting())
    state, _, run, _, summary = [list(column.cells) for column in table.columns]
    assert state == ["dead", "unknown", "retrying", "ended", "ended", "ended"]
    assert run == ["died", "far", "waits", "a0", "a1", ""]
    assert summary[-2:] == ["has finished (exit 0)", "3 more do not run"]
