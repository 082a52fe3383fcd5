"""Prometheus and Alertmanager of this machine, on loopback, with our rules, for some runs or a test.

Model: `MonitoringStack` is a context manager. It writes configuration into a private temporary directory,
starts both servers on ports that they choose themselves (no race for a free port), waits until they answer,
and ends them by pid. What is scraped stands in one file that Prometheus watches, so that runs may come, move
and go. Alertmanager's receivers are `WebhookReceiver`s of this process. `report()` says which alerts of the
loaded rules fired, were pending, or stayed silent while the stack ran.

Invariants: nothing is reachable from another host; after `stop` no process, port or directory is left; the
servers are told to die with the thread that started them where util-linux' `setpriv` is there.
Thread safety: one thread starts and stops; queries may come from any thread. Blocking: `start` up to
`START_TIMEOUT_S`, `stop` up to `STOP_TIMEOUT_S` a server. Must not: be needed by a training run.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import psutil
import yaml

from nvrx_sre.core.atomic import write_json_atomically
from nvrx_sre.core.clock import Clock, SystemClock, seconds, to_ns
from nvrx_sre.core.errors import InternalError, UserError
from nvrx_sre.core.secret_files import read_secret_lines
from nvrx_sre.core.tls import client_context
from nvrx_sre.monitoring import assets, query
from nvrx_sre.monitoring.alertmanager import Timing, alertmanager_config
from nvrx_sre.monitoring.promql import duration
from nvrx_sre.monitoring.webhook import Notification, WebhookReceiver

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.05
LOG_TAIL_BYTES = 2_000
DISCOVERY_INTERVAL_S = 5.0
"""How often Prometheus reads the targets again where the file system tells it nothing."""
RESEND_DELAY_S = 5.0
"""Prometheus knows its Alertmanager only some seconds after its start: what fired before is sent again after this."""
TARGETS_FILE = "targets.json"
LOCKED_TARGETS_FILE = "targets-with-password.json"
JOB, LOCKED_JOB = "nvrx-sre", "nvrx-sre-with-password"
LOCAL_LABELS = {"cluster": "local", "namespace": "default"}
"""Where a run of this machine is."""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Executables of the two servers."""

    prometheus: str
    alertmanager: str


def find_tools() -> Tools | None:
    """Prometheus and Alertmanager on the PATH (`alertmanager` or Debian's name), or None if one is missing."""
    prometheus = shutil.which("prometheus")
    alertmanager = shutil.which("alertmanager") or shutil.which("prometheus-alertmanager")
    if prometheus is None or alertmanager is None:
        return None
    return Tools(prometheus=prometheus, alertmanager=alertmanager)


@dataclass(frozen=True, kw_only=True)
class ScrapeAccess:
    """How Prometheus gets at endpoints with TLS or a password: it reads the files itself. Validated at construction."""

    ca: Path | None = None
    """PEM certificates that an https endpoint is checked against."""
    server_name: str = ""
    """Name in the endpoints' certificates, where it is not the host of their address."""
    user: str = ""
    """With `password`: the user of basic authentication."""
    password: Path | None = None
    """Private file of one line."""

    def __post_init__(self) -> None:
        if bool(self.user) != (self.password is not None):
            raise UserError("a user and a password file are given together: give both, or neither")
        if self.server_name and self.ca is None:
            raise UserError("a server name is checked against certificates: give the file of their CA too")
        if self.password is not None and len(read_secret_lines(self.password)) != 1:
            raise UserError(f"{self.password}: it must hold the password and nothing else")
        if self.ca is not None:
            client_context(self.ca)

    def tls_config(self) -> dict[str, Any]:
        """`tls_config` of a scrape job, {} without a CA; endpoints without TLS are not affected."""
        if self.ca is None:
            return {}
        name = {"server_name": self.server_name} if self.server_name else {}
        return {"tls_config": {"ca_file": str(self.ca.absolute()), **name}}

    def basic_auth(self) -> dict[str, Any]:
        """`basic_auth` of a scrape job: the name of the file, never what is in it. {} without a password."""
        if self.password is None:
            return {}
        return {"basic_auth": {"username": self.user, "password_file": str(self.password.absolute())}}


@dataclass(frozen=True, kw_only=True)
class ScrapeTarget:
    """One endpoint. Validated at construction."""

    url: str
    """E.g. `http://127.0.0.1:9400/metrics`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels for its series, e.g. cluster and namespace."""
    has_password: bool = False
    """It asks for the password of `ScrapeAccess`, which is sent to no other."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(f"metrics address {self.url!r} is not an http or https address")

    def to_group(self) -> dict[str, Any]:
        """The target as Prometheus' file discovery reads it."""
        parts = urlsplit(self.url)
        labels = {"__scheme__": parts.scheme, "__metrics_path__": parts.path or "/metrics", **self.labels}
        return {"targets": [parts.netloc], "labels": labels}


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """What to scrape at first, and how often. Validated at construction."""

    targets: tuple[ScrapeTarget, ...] = ()
    scrape_interval_s: float = 1.0
    """Between scrapes and between rule evaluations (seconds)."""
    rules: Path | None = None
    """Rule file; None for the shipped one."""
    group_wait_s: float = 1.0
    """How long Alertmanager collects before the first notification of a group (seconds)."""
    group_interval_s: float = 5.0
    """Between notifications of a group that changed (seconds)."""
    access: ScrapeAccess = field(default_factory=ScrapeAccess)
    """To endpoints with TLS or a password."""

    def __post_init__(self) -> None:
        for name in ("scrape_interval_s", "group_wait_s", "group_interval_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}: it must be greater than 0 seconds")


@dataclass(frozen=True, kw_only=True)
class AlertReport:
    """What the rules did while the stack ran; each alert stands in exactly one of the first three."""

    fired: tuple[str, ...]
    pending: tuple[str, ...]
    silent: tuple[str, ...]
    notified: tuple[str, ...]
    """Alerts that reached a receiver as firing, by name, sorted."""
    paged: tuple[str, ...]
    """Those that fired and would wake a person: severity critical."""


def prometheus_config(config: StackConfig, rules: Path, directory: Path, alertmanager_url: str) -> str:
    """prometheus.yml of the stack; the files of targets are in `directory`."""
    interval = duration(config.scrape_interval_s)
    value = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(rules)],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [urlsplit(alertmanager_url).netloc]}]}]},
        "scrape_configs": [
            _scrape_job(JOB, directory / TARGETS_FILE, config.access.tls_config()),
            _scrape_job(
                LOCKED_JOB,
                directory / LOCKED_TARGETS_FILE,
                {**config.access.tls_config(), **config.access.basic_auth()},
            ),
        ],
    }
    return yaml.safe_dump(value, sort_keys=False)


def _scrape_job(name: str, targets: Path, access: Mapping[str, Any]) -> dict[str, Any]:
    discovery = {"files": [str(targets)], "refresh_interval": duration(DISCOVERY_INTERVAL_S)}
    return {"job_name": name, **access, "file_sd_configs": [discovery]}


class MonitoringStack:
    """Both servers and the receiver. `with MonitoringStack(config) as stack: ...`."""

    def __init__(self, config: StackConfig, *, tools: Tools | None = None, clock: Clock | None = None) -> None:
        found = tools or find_tools()
        if found is None:
            raise UserError(
                "Prometheus or Alertmanager is not on the PATH: install prometheus and prometheus-alertmanager"
            )
        self._config = config
        self._tools = found
        self._clock = clock or SystemClock()
        self._directory: Path | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started_ns = 0
        self.receiver = WebhookReceiver()
        self.prometheus_url = ""
        self.alertmanager_url = ""

    def __enter__(self) -> MonitoringStack:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start receiver, Alertmanager and Prometheus; returns when both servers answer."""
        self._directory = Path(tempfile.mkdtemp(prefix="nvrx-sre-monitoring-"))
        self._started_ns = self._clock.monotonic_ns()
        self.receiver.start()
        self.alertmanager_url = self._start_alertmanager(self._directory)
        self.prometheus_url = self._start_prometheus(self._directory)

    def stop(self) -> None:
        """End the servers (terminate, then kill), close the receiver, remove the directory. Idempotent."""
        while self._processes:
            _end(self._processes.pop())
        self.receiver.stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def set_targets(self, targets: Sequence[ScrapeTarget]) -> None:
        """Scrape these from now on. Returns at once: Prometheus sees the new file within `DISCOVERY_INTERVAL_S`."""
        if self._directory is None:
            raise InternalError("the stack has not been started")
        for name, has_password in ((TARGETS_FILE, False), (LOCKED_TARGETS_FILE, True)):
            groups = [item.to_group() for item in targets if item.has_password is has_password]
            write_json_atomically(self._directory / name, groups, durable=False)

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers that this stack started and has not ended."""
        return [process.pid for process in self._processes]

    def notifications(self) -> list[Notification]:
        """What Alertmanager has sent so far."""
        return self.receiver.notifications()

    def report(self) -> AlertReport:
        """Which alerts fired, were pending or stayed silent since `start`."""
        window = duration(seconds(self._clock.monotonic_ns() - self._started_ns) + self._config.scrape_interval_s)
        seen: dict[str, set[str]] = {"firing": set(), "pending": set()}
        paged = set()
        for sample in query.instant(self.prometheus_url, f"count_over_time(ALERTS[{window}])"):
            seen[sample.labels["alertstate"]].add(sample.labels["alertname"])
            if sample.labels["alertstate"] == "firing" and sample.labels.get("severity") == "critical":
                paged.add(sample.labels["alertname"])
        names = sorted(set(query.alert_rule_names(self.prometheus_url)))
        notified = {name for item in self.notifications() for name in item.names("firing")}
        return AlertReport(
            fired=tuple(name for name in names if name in seen["firing"]),
            pending=tuple(name for name in names if name in seen["pending"] - seen["firing"]),
            silent=tuple(name for name in names if name not in seen["firing"] | seen["pending"]),
            notified=tuple(sorted(notified)),
            paged=tuple(sorted(paged)),
        )

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Ask `condition` again and again, at most `timeout_s` seconds; False if it never held.

        Raises `InternalError` if a server dies meanwhile.
        """
        deadline_ns = self._clock.monotonic_ns() + to_ns(timeout_s)
        while not condition():
            if self._clock.monotonic_ns() >= deadline_ns:
                return False
            for process in self._processes:
                _wait_for_death(process, POLL_S)
        return True

    def _start_alertmanager(self, directory: Path) -> str:
        file = directory / "alertmanager.yml"
        value = alertmanager_config(
            webhook_url=self.receiver.url,
            timing=Timing(group_wait_s=self._config.group_wait_s, group_interval_s=self._config.group_interval_s),
        )
        file.write_text(yaml.safe_dump(value), encoding="utf-8")
        arguments = [
            f"--config.file={file}",
            f"--storage.path={directory / 'alertmanager'}",
            "--web.listen-address=127.0.0.1:0",
            "--web.external-url=http://127.0.0.1/",
            "--cluster.listen-address=",
        ]
        return self._serve([self._tools.alertmanager, *arguments], directory / "alertmanager.log")

    def _start_prometheus(self, directory: Path) -> str:
        rules = self._config.rules or assets.asset(assets.RULES_FILE)
        file = directory / "prometheus.yml"
        self.set_targets(self._config.targets)
        text = prometheus_config(self._config, rules.resolve(), directory, self.alertmanager_url)
        file.write_text(text, encoding="utf-8")
        arguments = [
            f"--config.file={file}",
            f"--storage.tsdb.path={directory / 'prometheus'}",
            "--web.listen-address=127.0.0.1:0",
            "--web.external-url=http://127.0.0.1/",
            "--enable-feature=exemplar-storage",
            f"--rules.alert.resend-delay={duration(RESEND_DELAY_S)}",
        ]
        return self._serve([self._tools.prometheus, *arguments], directory / "prometheus.log")

    def _serve(self, command: Sequence[str], log: Path) -> str:
        """Start one server and return its base URL once it is ready."""
        setpriv = shutil.which("setpriv")
        prefix = [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                start_new_session=True,
            )
        self._processes.append(process)
        deadline_ns = self._clock.monotonic_ns() + round(START_TIMEOUT_S * 1e9)
        while self._clock.monotonic_ns() < deadline_ns:
            url = _listening_url(process.pid)
            if url is not None and _ready(url):
                return url
            if _wait_for_death(process, POLL_S):
                break
        tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        raise InternalError(f"{Path(command[0]).name} did not become ready: {tail}")


def _listening_url(pid: int) -> str | None:
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return None
    ports = [item.laddr.port for item in connections if item.status == psutil.CONN_LISTEN]
    return f"http://127.0.0.1:{ports[0]}" if ports else None


def _ready(url: str) -> bool:
    try:
        query.http_get(f"{url}/-/ready", timeout_s=1.0)
    except query.QueryError:
        return False
    return True


def _wait_for_death(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait on the process itself for up to `timeout_s` seconds; True if it has ended."""
    try:
        process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    if not _wait_for_death(process, STOP_TIMEOUT_S):
        process.kill()
        process.wait()
