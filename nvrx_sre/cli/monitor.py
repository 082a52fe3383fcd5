"""`nvrx-sre monitor`: Prometheus and Alertmanager of this machine for some runs, and what fires.

Model: `Watched` reads which endpoints the run directories name and gives them to the stack's targets file, so that
restarted launchers and new runs appear by themselves. Each turn asks Prometheus for the alerts and shows what changed:
a table on a terminal, a line a change with its time elsewhere. An alert that another one holds back, so that nobody is
told of it, says so. Runs until Ctrl-C, SIGTERM or the terminal's end; servers, ports and files are gone then.

Prometheus may have missed the end of a run, its directory says it: alerts whose rules ask whether the run has ended are
not shown of one that has. Those that outlive it (`NvrxRunHalted`, `NvrxCrashLooping`) are.

An endpoint with TLS or a password is scraped with the CA and the password file that were given; Prometheus reads both
files itself. One that they do not open is not scraped, and said not to be. A password goes over TLS or loopback only.

Must not: be needed by a run, or listen beyond loopback.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from nvrx_sre.cli.halt import existing_root, existing_run
from nvrx_sre.cli.report import make_console
from nvrx_sre.cli.run_options import DEFAULT_RUNS
from nvrx_sre.cli.watched import Endpoint, Resting, RunKey, Watched, ending
from nvrx_sre.core.clock import Clock, SystemClock, seconds
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.signals import SignalPipe
from nvrx_sre.monitoring import generate, query
from nvrx_sre.monitoring.alertmanager import WATCHDOG
from nvrx_sre.monitoring.alerts import over_with_run
from nvrx_sre.monitoring.inhibition import sources_of
from nvrx_sre.monitoring.notices import RESOLVED_ANNOTATION
from nvrx_sre.monitoring.stack import MonitoringStack, ScrapeAccess, StackConfig
from nvrx_sre.monitoring.values import Values, load_values

TURN_S = 1.0
"""Between two looks at the run directories and at the alerts."""
MAX_RESTING_SHOWN = 5
"""Of the runs that do not run; those that are not over are all shown."""
FACTS = (("culprit", "culprit "), ("progress", ""))
"""(annotation, what stands before it) of what is told with the summary."""
STYLES = {"critical": "bold red", "warning": "yellow", "info": ""}


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One alert as it is shown."""

    state: str
    alert: str
    namespace: str
    run: str
    severity: str
    summary: str
    facts: str = ""
    """Culprit and progress, where they are known."""
    resolved: str = ""
    """How it ended, at its last evaluation."""
    held_back_by: str = ""
    """The alert that keeps Alertmanager from telling of this one; empty where nothing does."""

    @property
    def text(self) -> str:
        """What a person reads."""
        facts = f" ({self.facts})" if self.facts else ""
        silent = f" [held back by {self.held_back_by}]" if self.held_back_by else ""
        return f"{self.summary}{facts}{silent}"


def shown_alerts(alerts: Iterable[Mapping[str, Any]]) -> list[Shown]:
    """Alerts of Prometheus' API that a person should see, most urgent first; the dead man's switch always fires."""
    given = list(alerts)
    firing = {_about(item) for item in given if item["state"] == "firing"}
    found = [_shown(item, firing) for item in given]
    order = list(STYLES)
    return sorted(
        (item for item in found if item.severity in order and item.alert != WATCHDOG),
        key=lambda item: (item.state != "firing", order.index(item.severity), item.run, item.alert),
    )


def news(
    alerts: Iterable[Mapping[str, Any]], settled: Collection[RunKey], over: Collection[str]
) -> list[Mapping[str, Any]]:
    """Alerts of Prometheus' API without those that are `over` with their run, of runs that are `settled`."""
    return [item for item in alerts if not (_about(item)[0] in over and _about(item)[1:] in settled)]


def _about(item: Mapping[str, Any]) -> tuple[str, str, str]:
    labels = item["labels"]
    return labels["alertname"], labels.get("namespace", ""), labels.get("run", "")


def _shown(item: Mapping[str, Any], firing: set[tuple[str, str, str]]) -> Shown:
    annotations = item["annotations"]
    alert, namespace, run = _about(item)
    return Shown(
        state=item["state"],
        alert=alert,
        namespace=namespace,
        run=run,
        severity=item["labels"].get("severity", ""),
        summary=annotations.get("summary", ""),
        facts="; ".join(f"{word}{annotations[name]}" for name, word in FACTS if annotations.get(name)),
        resolved=annotations.get(RESOLVED_ANNOTATION, ""),
        held_back_by=next((source for source in sources_of(alert) if (source, namespace, run) in firing), ""),
    )


def changes(before: Sequence[Shown], now: Sequence[Shown]) -> list[str]:
    """One line for each alert that began to fire or ceased to."""
    was, fires = _firing(before), _firing(now)
    began = [
        f"firing {_what(item)}: {item.text} See: nvrx-sre runbook {item.alert}"
        for key, item in fires.items()
        if key not in was
    ]
    ceased = [
        f"resolved {_what(item)}{f': {item.resolved}' if item.resolved else ''}"
        for key, item in was.items()
        if key not in fires
    ]
    return began + ceased


def _firing(alerts: Sequence[Shown]) -> dict[str, Shown]:
    return {_what(item): item for item in alerts if item.state == "firing"}


def _what(item: Shown) -> str:
    return f"{item.severity} {item.alert} namespace={item.namespace} run={item.run}"


def alert_table(
    endpoints: Sequence[Endpoint], alerts: Sequence[Shown], access: ScrapeAccess, resting: Sequence[Resting] = ()
) -> Table:
    """What is watched, what fires, and what does not run, for a terminal."""
    runs = ", ".join(dict.fromkeys(item.run for item in endpoints)) or "none"
    table = Table(title=f"runs: {runs}", title_justify="left", expand=True)
    for name in ("state", "severity", "run", "alert", "summary"):
        table.add_column(name, overflow="fold")
    for item in alerts:
        table.add_row(item.state, item.severity, item.run, item.alert, item.text, style=STYLES.get(item.severity, ""))
    hidden = [(endpoint, why) for endpoint in endpoints if (why := endpoint.unscraped_because(access))]
    for endpoint, why in hidden:
        table.add_row("unknown", "", endpoint.run, "", f"not scraped, {why}")
    told = told_resting(resting)
    for one in told:
        table.add_row(one.word, "", one.run, "", one.state)
    if len(resting) > len(told):
        table.add_row("ended", "", "", "", f"{len(resting) - len(told)} more do not run")
    if not endpoints and not resting:
        table.add_row("unknown", "", "", "", "no run is there to be watched")
    elif endpoints and not alerts and len(hidden) < len(endpoints):
        table.add_row("quiet", "", "", "", "nothing fires")
    return table


def told_resting(resting: Sequence[Resting]) -> list[Resting]:
    """Those to be told of one by one: all that are not over, and of the others as many as there is room for."""
    awaited = [item for item in resting if not item.is_over]
    over = [item for item in resting if item.is_over]
    return awaited + over[: max(0, MAX_RESTING_SHOWN - len(awaited))]


@click.command("monitor")
@click.argument("run_dirs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN_DIR]...")
@click.option("--root", type=click.Path(path_type=Path), metavar="DIR",
              help="Watch every run below DIR, new ones too.  [default: runs, without RUN_DIR]")  # fmt: skip
@click.option("--values", "values_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="YAML file that overrides values of the rules.")  # fmt: skip
@click.option("--scrape-interval", type=click.FloatRange(0.1), default=5.0, show_default=True, metavar="S",
              help="Seconds between scrapes, and between evaluations.")  # fmt: skip
@click.option("--metrics-ca", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="PEM certificates that endpoints with TLS are checked against.")  # fmt: skip
@click.option("--metrics-server-name", default="", metavar="NAME",
              help="Name in the endpoints' certificates.  [default: the host of their address]")  # fmt: skip
@click.option("--metrics-user", default="", metavar="NAME", help="User of endpoints that ask for a password.")
@click.option("--metrics-password-file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Private file (0600) of that user's password.")  # fmt: skip
def command(
    run_dirs: tuple[Path, ...], root: Path | None, values_path: Path | None, scrape_interval: float, **endpoints: Any
) -> int:
    """Watch runs with a Prometheus and an Alertmanager on loopback.

    Both are taken from the PATH.
    """
    access = ScrapeAccess(
        ca=endpoints["metrics_ca"],
        server_name=endpoints["metrics_server_name"],
        user=endpoints["metrics_user"],
        password=endpoints["metrics_password_file"],
    )
    for run_dir in run_dirs:
        existing_run(run_dir)
    if root is not None:
        existing_root(root)
    if root is None and not run_dirs:
        root = DEFAULT_RUNS
    clock = SystemClock()
    watched = Watched([path.absolute() for path in run_dirs], root, clock, scrape_interval_s=scrape_interval)
    values = Values() if values_path is None else load_values(values_path)
    console = make_console()
    with (
        tempfile.TemporaryDirectory(prefix="nvrx-sre-monitor-") as directory,
        contextlib.closing(SignalPipe()) as stopped,
    ):
        rules = Path(directory) / "nvrx-sre.rules.yaml"
        rules.write_text(generate.rules_file(values), encoding="utf-8")
        config = StackConfig(scrape_interval_s=scrape_interval, rules=rules, access=access)
        with MonitoringStack(config) as stack:
            console.print(f"Prometheus at {stack.prometheus_url} and Alertmanager at {stack.alertmanager_url}")
            view = View(console, access, clock)
            with view:
                while not stopped.wait(TURN_S):
                    view.turn(stack, watched)
    console.print("stopped")
    return ExitCode.FINISHED


class View:
    """Shows one turn after the other: a live table on a terminal, changes as lines elsewhere."""

    def __init__(self, console: Console, access: ScrapeAccess, clock: Clock) -> None:
        self._console = console
        self._access = access
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._endpoints: list[Endpoint] | None = None
        self._alerts: list[Shown] = []
        self._over_with_run = over_with_run(Values())

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def turn(self, stack: MonitoringStack, watched: Watched) -> None:
        """Look once. What Prometheus cannot answer now is asked again at the next turn."""
        endpoints = watched.refresh()
        if endpoints != self._endpoints:
            self._turn_to(endpoints, stack, watched.resting())
            self._endpoints = endpoints
        with contextlib.suppress(query.QueryError):
            told = query.alerts(stack.prometheus_url)
            alerts = shown_alerts(news(told, watched.settled(), self._over_with_run))
            for line in changes(self._alerts, alerts):
                self._say(line)
            self._alerts = alerts
        if self._live is not None:
            self._live.update(alert_table(endpoints, self._alerts, self._access, watched.resting()), refresh=True)

    def _turn_to(self, endpoints: Sequence[Endpoint], stack: MonitoringStack, resting: Sequence[Resting]) -> None:
        """Scrape these from now on; say what is not scraped any more or cannot be, and at first what does not run."""
        refused = {item.url: item.unscraped_because(self._access) for item in endpoints}
        scraped = [item for item in endpoints if not refused[item.url]]
        stack.set_targets([item.target() for item in scraped])
        left = {item.directory: item.run for item in endpoints}
        gone = {item.directory: item.run for item in self._endpoints or () if item.directory not in left}
        for directory, run in gone.items():
            self._say(f"not watching {run} any more: {ending(directory)}")
        if self._endpoints is None:
            self._say_resting(resting)
        none = "no run" if self._endpoints is not None else "no run until one is started" if resting else "no run yet"
        self._say(f"watching {', '.join(f'{item.run} ({item.url})' for item in scraped) or none}")
        for item in endpoints:
            if refused[item.url]:
                self._say(f"not watching {item.run} ({item.url}): {refused[item.url]}")

    def _say_resting(self, resting: Sequence[Resting]) -> None:
        told = told_resting(resting)
        for item in told:
            self._say(f"{item.run} {item.state}")
        if len(resting) > len(told):
            self._say(f"{len(resting) - len(told)} more do not run")

    def _say(self, line: str) -> None:
        if self._live is None:
            now = datetime.fromtimestamp(seconds(self._clock.wall_ns()), UTC)
            self._console.print(f"{now:%Y-%m-%d %H:%M:%S}Z {line}", markup=False, highlight=False, soft_wrap=True)
