"""Pictures of the dashboards in docs/screenshots/: runs in trouble, a Prometheus that scrapes them, a Chromium.

Model: each `Scene` is a real training run with planned faults. Its journal tells when the situation began; when all
have, the Run dashboard is drawn from its own JSON and the data of each scene's moment. One scene cannot be had from a
healthy program: a stalled run, whose watchdog fails. For it the journal of the first run is cut off at a step and
folded further while nothing comes; Prometheus gets the result as backfilled blocks.

Run it as `make screenshots`: a few minutes, two cores. Everything it starts ends with it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from nvrx_sre.core.clock import NS_PER_S, seconds, to_ns
from nvrx_sre.events.journal import read_journal
from nvrx_sre.events.schema import FaultDetected, GenerationFormed, IncidentClosed, Record, Verdict
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.monitoring import picture, picture_data, query
from nvrx_sre.monitoring.dashboards import boards, dashboard_files
from nvrx_sre.monitoring.picture_data import View
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry.metrics import MetricsFold
from nvrx_sre.testing.clock import ManualClock

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "screenshots"
SCRAPE_S = 1.0
LIMIT_S = 240.0
"""For a scene's situation to arise, on a machine that is busy with the others."""
POLL_S = 0.5
RENDEZVOUS_SETTLE_S = 45.0
"""Longer than half the deadline, from which on it counts as stuck; shorter than the deadline."""
TOOL_TIMEOUT_S = 60.0
"""For one picture, or the backfill of one run."""
STALLED_CUT_STEP = 40
STALLED_SILENCE_S = 240.0
STALLED_SAMPLE_S = 2.0
LABELS = {"cluster": "lab", "namespace": "research"}
COMMON = "--steps 1000000 --seq-len 32 --batch-size 4 --save-every 25 --metrics-linger 0"
"""Options of every run: small, quick, without an end."""

Journal = list[Record]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run and the moment of its picture: `settle_s` seconds after the record that `begins` finds in its journal."""

    name: str
    options: tuple[str, ...]
    begins: Callable[[Journal], Record | None]
    settle_s: float
    whole: bool = False
    """The whole dashboard, not only its top row."""


def _nth(records: Journal, kind: type, number: int) -> Record | None:
    found = [record for record in records if isinstance(record.event, kind)]
    return found[number - 1] if len(found) >= number else None


def _waiting_in_rendezvous(records: Journal) -> Record | None:
    """The first fault of a run whose second formation does not come while the picture is taken."""
    fault, formed = _nth(records, FaultDetected, 1), _nth(records, GenerationFormed, 2)
    if fault is None or formed is None:
        return fault
    return fault if formed.time_ns - fault.time_ns > to_ns(RENDEZVOUS_SETTLE_S) else None


def _flapping(records: Journal) -> Record | None:
    closed = [record for record in records if isinstance(record.event, IncidentClosed)]
    return next((record for record in closed if record.event.verdict is Verdict.FLAPPING), None)


def _faults(*specs: str) -> tuple[str, ...]:
    return tuple(word for spec in specs for word in ("--fault", spec))


SCENES = (
    Scene(
        name="recovery",
        options=_faults("exception@1:60", "sigkill@0:120"),
        begins=lambda records: _nth(records, IncidentClosed, 2),
        settle_s=20.0,
        whole=True,
    ),
    Scene(
        name="crash-loop",
        options=("--standbys", "0", *_faults("sigkill@1:60x*")),
        begins=lambda records: _nth(records, FaultDetected, 3),
        settle_s=15.0,
    ),
    Scene(
        name="flapping",
        options=("--standbys", "0", *_faults(*(f"exception@{step // 40 % 2}:{step}" for step in range(40, 281, 40)))),
        begins=_flapping,
        settle_s=15.0,
    ),
    Scene(
        name="rendezvous",
        options=("--standbys", "0", *_faults("exception@0:60", "hang@1:60/rendezvous")),
        begins=_waiting_in_rendezvous,
        settle_s=RENDEZVOUS_SETTLE_S,
    ),
)


def main() -> int:
    """Take all pictures."""
    missing = [name for name in ("chromium", "prometheus", "promtool") if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"screenshots: {', '.join(missing)} not on the PATH: see scripts/")
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nvrx-sre-screenshots-") as name, contextlib.ExitStack() as entered:
        directory = Path(name)
        ports = {scene.name: _free_port() for scene in SCENES}
        start_s = time.time()
        base_url = entered.enter_context(_prometheus(directory / "live", list(ports.values())))
        runs = {scene.name: entered.enter_context(_run(directory, scene, ports[scene.name])) for scene in SCENES}
        moments = _wait_for_scenes(directory, start_s, runs)
        for scene in SCENES:
            view = _view(base_url, scene.name, start_s, moments[scene.name])
            _shoot("run", f"run-{scene.name}", view, whole=scene.whole)
        for board in boards():
            run = "recovery" if board.one_run else ".*"
            if board.slug != "run":
                _shoot(board.slug, board.slug, _view(base_url, run, start_s, max(moments.values())))
        _take_stalled(directory, _journal(directory / "recovery"))
    return 0


def _wait_for_scenes(directory: Path, start_s: float, runs: dict[str, subprocess.Popen[bytes]]) -> dict[str, float]:
    """The moment of each scene's picture (seconds since the Unix epoch), once all of them have passed."""
    moments: dict[str, float] = {}
    while len(moments) < len(SCENES) or time.time() < max(moments.values()) + 2 * SCRAPE_S:
        if time.time() - start_s > LIMIT_S:
            missing = [scene.name for scene in SCENES if scene.name not in moments]
            raise SystemExit(f"screenshots: {', '.join(missing)} did not come about within {LIMIT_S:.0f} s")
        for scene in SCENES:
            if runs[scene.name].poll() is not None:
                raise SystemExit(f"screenshots: {scene.name} ended: {_log_tail(directory / (scene.name + '.log'))}")
            record = None if scene.name in moments else scene.begins(_journal(directory / scene.name))
            if record is not None:
                moments[scene.name] = seconds(record.time_ns) + scene.settle_s
        time.sleep(POLL_S)
    return moments


def _take_stalled(directory: Path, records: Journal) -> None:
    """The first run's journal, cut off in the middle of training, and then silence."""
    steps = [i for i, record in enumerate(records) if getattr(record.event, "last_step", 0) >= STALLED_CUT_STEP]
    told = records[: steps[0] + 1]
    start_s, end_s = seconds(told[0].time_ns), seconds(told[-1].time_ns) + STALLED_SILENCE_S
    lines = directory / "stalled.om"
    lines.write_text("\n".join(_exposition(told, "stalled", end_s)) + "\n# EOF\n", encoding="utf-8")
    data = directory / "backfilled"
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(lines), str(data)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=TOOL_TIMEOUT_S)
    with _prometheus(data, []) as base_url:
        view = View(
            base_url=base_url, start_s=start_s, end_s=end_s, variables=_variables("stalled"),
            scrape_interval_s=STALLED_SAMPLE_S,
        )  # fmt: skip
        _shoot("run", "run-stalled", view, whole=False)


def _exposition(records: Journal, run: str, end_s: float) -> Iterator[str]:
    """Samples of what the folds export every `STALLED_SAMPLE_S`, while the records come and after."""
    ledger, tracker = Ledger(), IncidentTracker(run)
    clock = ManualClock(wall_offset_ns=0, start_ns=records[0].time_ns)
    fold = MetricsFold(run, ledger, tracker, clock)
    waiting = list(reversed(records))
    while seconds(clock.wall_ns()) < end_s:
        while waiting and waiting[-1].time_ns <= clock.wall_ns():
            record = waiting.pop()
            ledger.apply(record)
            tracker.apply(record)
            fold.apply(record)
        fold.loop_turned(clock.wall_ns())
        for family in fold.registry.collect():
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in {**sample.labels, **LABELS}.items())
                yield f"{sample.name}{{{labels}}} {sample.value} {clock.wall_ns() / NS_PER_S:.3f}"
        clock.advance_to(clock.wall_ns() + to_ns(STALLED_SAMPLE_S))


def _shoot(slug: str, name: str, view: View, *, whole: bool = True) -> None:
    """Draw a dashboard and take its picture, or that of its top row alone."""
    document = json.loads(dashboard_files(Values())[f"dashboards/{slug}.json"])
    panels = picture_data.evaluate(document, view)
    html = picture.page(document, panels, picture_data.marks(document, view), view)
    with tempfile.TemporaryDirectory(prefix="nvrx-sre-picture-") as directory:
        page = Path(directory) / "page.html"
        page.write_text(html, encoding="utf-8")
        height = picture.page_height(document) if whole else picture.top_height(document)
        _chromium(page, OUT / f"{name}.png", height)
    sys.stdout.write(f"docs/screenshots/{name}.png\n")


def _chromium(page: Path, target: Path, height: int) -> None:
    profile = page.parent / "profile"
    arguments = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
        # else a busy machine's picture may lack what was not painted yet
        "--run-all-compositor-stages-before-draw", "--virtual-time-budget=2000",
        f"--window-size={picture.PAGE_WIDTH},{height}", f"--screenshot={target}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=TOOL_TIMEOUT_S)


def _view(base_url: str, run: str, start_s: float, end_s: float) -> View:
    variables = _variables(run)
    return View(base_url=base_url, start_s=start_s, end_s=end_s, variables=variables, scrape_interval_s=SCRAPE_S)


def _variables(run: str) -> dict[str, str]:
    return {"cluster": ".*", "namespace": ".*", "run": run, "price": "2"}


@contextlib.contextmanager
def _run(directory: Path, scene: Scene, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A scene's run, until the pictures are taken."""
    place = ("--run-dir", str(directory / scene.name), "--metrics-port", str(port))
    command = [sys.executable, "-m", "nvrx_sre", "train", *place, *COMMON.split(), *scene.options]
    with (directory / f"{scene.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    with _ending(process):
        yield process


@contextlib.contextmanager
def _prometheus(data: Path, ports: list[int]) -> Iterator[str]:
    """A Prometheus on loopback over `data` that scrapes `ports`; its base URL once it answers."""
    data.mkdir(parents=True, exist_ok=True)
    targets = [{"targets": [f"127.0.0.1:{port}" for port in ports], "labels": LABELS}]
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S:g}s", "scrape_timeout": f"{SCRAPE_S:g}s"},
        "scrape_configs": [{"job_name": "nvrx-sre", "static_configs": targets}],
    }
    file = data / "prometheus.yml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{_free_port()}"
    command = [
        "prometheus", f"--config.file={file}", f"--storage.tsdb.path={data}", f"--web.listen-address={address}",
        "--storage.tsdb.retention.time=10y",
    ]  # fmt: skip
    log = data / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    with _ending(process):
        deadline_s = time.time() + 30
        while not _is_ready(f"http://{address}"):
            if process.poll() is not None or time.time() > deadline_s:
                raise SystemExit(f"screenshots: Prometheus did not start: {_log_tail(log)}")
            time.sleep(POLL_S)
        yield f"http://{address}"


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the process with the block: asked first, then killed."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(base_url: str) -> bool:
    try:
        query.http_get(f"{base_url}/-/ready", timeout_s=1.0)
    except query.QueryError:
        return False
    return True


def _journal(run_dir: Path) -> Journal:
    directory = run_dir / "journal"
    return list(read_journal(directory)) if directory.is_dir() else []


def _log_tail(path: Path) -> str:
    return path.read_bytes()[-1500:].decode(errors="replace")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
