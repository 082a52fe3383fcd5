"""Which endpoints `nvrx-sre monitor` scrapes, and which of its runs have ended.

Model: run directories say both. metrics.json, which each launcher's start writes anew, names the endpoint; the summary,
which is written last, the exit code. The newer of the two is what holds. Over several nodes the followers of the
leader's epoch are scraped beside it, where they can be reached from here. All is read once a turn, by `refresh`; what
else is asked is answered from that.

Invariants: a launcher that died without a summary stays watched, that it is missing is what the rules must see. How
long a run has been seen again is told by our own monotonic clock: the storage's may differ. Not thread-safe. Must not:
write anything, or take a run that waits for its orchestrator (exit 70, 75) for one that is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from nvrx_sre.core.clock import Clock, to_ns
from nvrx_sre.core.errors import ExitCode
from nvrx_sre.core.tls import is_loopback
from nvrx_sre.goodput.verdict import run_state_after
from nvrx_sre.launcher.host import node_name
from nvrx_sre.launcher.rundir import RunDirectory, read_json
from nvrx_sre.monitoring.recordings import SETTLED_STATES
from nvrx_sre.monitoring.stack import LOCAL_LABELS, ScrapeAccess, ScrapeTarget

SEEN_AGAIN_S = 60.0
SEEN_AGAIN_INTERVALS = 3
"""After a new start, the longer of both: by then a scrape and an evaluation have seen it, and what fired before has
ceased."""
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}

RunKey = tuple[str, str]
"""(namespace, run): what an alert of this machine's Prometheus is about."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a launcher says that it serves its metrics."""

    run: str
    directory: Path
    url: str
    pid: int
    has_password: bool = False
    node: str = ""
    """Of a follower: the name of its host."""
    epoch: int = 0
    """Of a follower: the leadership that it joined."""

    def unscraped_because(self, access: ScrapeAccess) -> str:
        """Why it cannot be scraped with `access`; empty where it can."""
        parts = urlsplit(self.url)
        has_tls = parts.scheme == "https"
        if self.node not in ("", node_name()) and is_loopback(parts.hostname or ""):
            return f"node {self.node} serves on its loopback: give its launcher --metrics-host"
        if self.has_password and not has_tls and not is_loopback(parts.hostname or ""):
            return "its password would be sent in the clear"
        lacks_ca, lacks_password = has_tls and access.ca is None, self.has_password and access.password is None
        has = [*(["TLS"] if lacks_ca else []), *(["a password"] if lacks_password else [])]
        give = [*(["--metrics-ca"] if lacks_ca else []), *(["--metrics-user and its file"] if lacks_password else [])]
        return f"its endpoint has {' and '.join(has)}: give {', '.join(give)}" if has else ""

    def target(self) -> ScrapeTarget:
        """What Prometheus scrapes; the directory that holds the run's is its namespace."""
        labels = {**LOCAL_LABELS, "namespace": self.key[0]}
        return ScrapeTarget(url=self.url, labels=labels, has_password=self.has_password)

    @property
    def key(self) -> RunKey:
        """The labels that its alerts will have."""
        return self.directory.parent.name or LOCAL_LABELS["namespace"], self.run

    def is_live(self, paths: RunDirectory) -> bool:
        """Whether its launcher still runs, as far as this machine can know."""
        is_here = is_loopback(urlsplit(self.url).hostname or "")
        return not is_here or paths.live_launcher() == self.pid


@dataclass(frozen=True, kw_only=True)
class Resting:
    """A run that does not run now."""

    run: str
    word: str
    """What became of it."""
    state: str
    """The same: a predicate."""
    is_over: bool = False
    """It ended with an exit code after which nobody expects it to run."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a run directory says at one turn."""

    endpoint: Endpoint
    is_live: bool
    has_ended: bool
    """Its newest launcher ended in order."""
    exit_code: int | None
    """How; None if it did not end, or does not say."""

    @property
    def is_over(self) -> bool:
        """It ended, and nobody expects it to answer."""
        return self.exit_code is not None and run_state_after(self.exit_code) in SETTLED_STATES


class Watched:
    """Runs to watch, as of the last `refresh`. Not thread-safe."""

    def __init__(
        self, directories: Sequence[Path], root: Path | None, clock: Clock, *, scrape_interval_s: float
    ) -> None:
        self._directories = directories
        self._root = root
        self._clock = clock
        self._seen_again_ns = to_ns(max(SEEN_AGAIN_S, SEEN_AGAIN_INTERVALS * scrape_interval_s))
        self._looks: dict[Path, Look] = {}
        self._known: dict[Path, Endpoint] = {}
        self._over_ns: dict[Path, int] = {}
        """When a run was last seen to be over (monotonic clock)."""

    def refresh(self) -> list[Endpoint]:
        """Read the run directories; the endpoints to scrape now.

        One whose launcher died stays: that it is missing is what the rules must see. One whose run ended in order
        goes, and one that was dead before we came never appears.
        """
        now_ns = self._clock.monotonic_ns()
        self._looks = {path: look for path in self._candidates() if (look := look_at(path)) is not None}
        self._known = {
            path: look.endpoint
            for path, look in self._looks.items()
            if look.is_live or (self._known.get(path) == look.endpoint and not look.has_ended)
        }
        self._over_ns = {
            path: over_ns for path, over_ns in self._over_ns.items() if now_ns - over_ns < self._seen_again_ns
        } | {path: now_ns for path, look in self._looks.items() if look.is_over}
        return [item for directory, leader in self._known.items() for item in (leader, *read_followers(directory))]

    def settled(self) -> set[RunKey]:
        """Runs of whose being alive a rule tells no news: they are over, or were until a moment ago.

        That is: ended with an exit code after which nobody expects them to answer, and not started again long enough
        ago for that to have been seen.
        """
        ended: set[RunKey] = set()
        others: set[RunKey] = set()
        for directory, look in self._looks.items():
            if directory in self._over_ns and (look.is_over or not look.has_ended):
                ended.add(look.endpoint.key)
            elif directory in self._known:
                others.add(look.endpoint.key)
        return ended - others

    def resting(self) -> list[Resting]:
        """Runs that are not scraped since they do not run: those that were named, and all where none is scraped.

        First those from which more was expected.
        """
        chosen = self._directories if self._known else self._looks
        found = [
            _resting(directory, self._looks[directory])
            for directory in chosen
            if directory in self._looks and directory not in self._known
        ]
        return sorted(found, key=lambda item: item.is_over)

    def _candidates(self) -> Iterable[Path]:
        below = sorted(path.parent for path in self._root.glob("*/metrics.json")) if self._root is not None else []
        return dict.fromkeys([*self._directories, *(path.absolute() for path in below)])


def read_followers(directory: Path) -> list[Endpoint]:
    """Endpoints of the nodes that joined the newest leader: a file of an earlier epoch may name another's port."""
    newest = RunDirectory(directory).newest_epoch()
    found = (read_endpoint(directory, file) for file in sorted(directory.glob("metrics-*.json")))
    return [item for item in found if item is not None and item.epoch == newest]


def read_endpoint(directory: Path, file: Path | None = None) -> Endpoint | None:
    """What metrics.json, or the file of a follower, says; None if there is none (yet) or it is damaged."""
    value = read_json(RunDirectory(directory).metrics if file is None else file)
    try:
        node, epoch = str(value.get("node", "")), int(value.get("epoch", 0))
        parts = urlsplit(str(value["url"]))
        host = parts.hostname or ""
        if host in ANY_HOST:
            host = ANY_HOST[host] if node in ("", node_name()) else node
        netloc = f"[{host}]:{parts.port}" if ":" in host else f"{host}:{parts.port}"
        url = urlunsplit((parts.scheme, netloc, parts.path, "", ""))
        has_password = bool(value.get("password"))
        run, pid = str(value["run"]), int(value["pid"])
        return Endpoint(
            run=run, directory=directory, url=url, pid=pid, has_password=has_password, node=node, epoch=epoch
        )
    except (AttributeError, TypeError, KeyError, ValueError):
        return None


def has_ended(paths: RunDirectory) -> bool:
    """Whether the newest launcher ended in order: it writes the summary last."""
    try:
        return paths.summary.stat().st_mtime_ns >= paths.metrics.stat().st_mtime_ns
    except OSError:
        return False


def exit_code(paths: RunDirectory) -> int | None:
    """How the newest launcher that ended in order did so."""
    summary = read_json(paths.summary)
    code = summary.get("exit_code") if isinstance(summary, dict) else None
    return code if isinstance(code, int) else None


def look_at(directory: Path) -> Look | None:
    """What the run directory says; None if it names no endpoint."""
    paths = RunDirectory(directory)
    endpoint = read_endpoint(directory, paths.metrics)
    if endpoint is None:
        return None
    ended = has_ended(paths)
    return Look(
        endpoint=endpoint,
        is_live=endpoint.is_live(paths),
        has_ended=ended,
        exit_code=exit_code(paths) if ended else None,
    )


def ending(directory: Path) -> str:
    """Why a run is not watched any more."""
    paths = RunDirectory(directory)
    code = exit_code(paths) if has_ended(paths) else None
    return "its directory names no endpoint" if code is None else f"it ended with exit {code}"


def _resting(directory: Path, look: Look) -> Resting:
    """What became of a run whose launcher is not there."""
    code, run = look.exit_code, look.endpoint.run
    if code is not None:
        state = f"has {'finished' if code == ExitCode.FINISHED else 'ended'} (exit {code})"
        return Resting(run=run, word="ended" if look.is_over else "retrying", state=state, is_over=look.is_over)
    node = RunDirectory(directory).newest_holder().get("node", node_name())
    if node != node_name():
        return Resting(run=run, word="unknown", state=f"cannot be seen from here: its launcher is, or was, on {node}")
    return Resting(run=run, word="dead", state="does not run: its launcher died and left no exit code")
