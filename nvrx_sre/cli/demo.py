"""`nvrx-sre demo`: the reference trainer with one fault of every layer, watched by Prometheus where there is one.

Model: the same road as `train`, with a fixed plan; `MonitoringStack` is put around it if Prometheus and
Alertmanager are on the PATH. The stack is a spectator: the run is the same without it.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import textwrap
from pathlib import Path

import click

from nvrx_sre.cli.output_file import check_output_file
from nvrx_sre.cli.ownership import check_unowned
from nvrx_sre.cli.report import make_console
from nvrx_sre.cli.run_options import RunOptions
from nvrx_sre.cli.running import run_and_report
from nvrx_sre.cli.train import training_run
from nvrx_sre.core.atomic import make_private_directory
from nvrx_sre.core.errors import NvrxError, UserError
from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.monitoring.stack import LOCAL_LABELS, AlertReport, MonitoringStack, ScrapeTarget, StackConfig, find_tools
from nvrx_sre.trainer.config import TrainerConfig

STEPS = 300
NUM_RANKS = 2
SAVE_EVERY = 50
FAULTS = (
    "exception@1:40",
    "sigkill@0:90",
    "hang@1:140",
    "corrupt_checkpoint@0:235",
    "node_kill@0:240",
)
"""One fault for each way down: in process, one process replaced, a hang, then the newest durable checkpoint is
truncated and the node lost, so that the run must fall back to the checkpoint before it."""
STEP_DEADLINE_S = 4.0
"""Short, so that the demo's hang is found while a person watches; a step takes well under a tenth of it."""
SCRAPE_INTERVAL_S = 1.0
ALERTS_COLUMN = 15
MARK_FILE = "made-by-demo"
"""In the run directories that the next demo may replace."""


@click.command("demo")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    metavar="DIR",
    help="Run directory; that of an earlier demo is replaced.",
)
@click.option("--steps", type=click.IntRange(0), default=STEPS, show_default=True, metavar="N", help="Optimizer steps.")
@click.option("--no-faults", is_flag=True, help="The same run without its faults, to compare the digests.")
@click.option("--no-monitoring", is_flag=True, help="Do not start Prometheus and Alertmanager.")
@click.option("--summary", type=click.Path(path_type=Path), metavar="FILE", help="Write the run's summary as JSON.")
def command(run_dir: Path, steps: int, no_faults: bool, no_monitoring: bool, summary: Path | None) -> int:
    """Train through five faults, and show how each is recovered.

    An exception, a SIGKILL, a hang, and a corrupt checkpoint followed by the loss of the node.
    """
    run_dir = run_dir.absolute()
    check_output_file(summary, made=run_dir)
    trainer = TrainerConfig(steps=steps)
    watched = not no_monitoring and find_tools() is not None
    options = _options(run_dir, () if no_faults else FAULTS, summary, _free_port() if watched else None)
    config = training_run(options, trainer, NUM_RANKS)
    replace_earlier(run_dir)
    with contextlib.ExitStack() as entered:
        stack = _monitor(entered, config.metrics_port) if config.metrics_port is not None else None
        exit_code = run_and_report(config, num_steps=steps)
        if stack is not None:
            _print_alerts(stack)
    return exit_code


def replace_earlier(run_dir: Path) -> None:
    """An empty directory in the place of an earlier demo's.

    Raises `UserError` rather than remove anything else, and `RunDirectoryBusy` if that demo still runs.
    """
    try:
        if run_dir.is_symlink() or run_dir.exists():
            if run_dir.is_symlink() or not ((run_dir / MARK_FILE).is_file() or _is_empty(run_dir)):
                raise UserError(f"{run_dir} exists and was not made by `nvrx-sre demo`: choose another --run-dir")
            check_unowned(run_dir)
            shutil.rmtree(run_dir)
        make_private_directory(run_dir)
        (run_dir / MARK_FILE).touch()
    except OSError as error:
        raise UserError(
            f"run directory {run_dir} cannot be used: {error.strerror}; choose another --run-dir"
        ) from error


def _is_empty(path: Path) -> bool:
    return path.is_dir() and next(path.iterdir(), None) is None


def alert_lines(report: AlertReport, width: int) -> list[str]:
    """What the rules said about the run, for people: lines of at most `width` characters."""
    named = {
        "pages:": report.paged,
        "alerts fired:": report.fired,
        "notified:": report.notified,
        "only pending:": report.pending,
        "stayed silent:": report.silent,
    }
    indent = " " * ALERTS_COLUMN
    return [
        line
        for what, alerts in named.items()
        for line in textwrap.wrap(
            ", ".join(alerts) or "none", width, initial_indent=what.ljust(ALERTS_COLUMN), subsequent_indent=indent
        )
    ]


def _print_alerts(stack: MonitoringStack) -> None:
    console = make_console()
    try:
        lines = alert_lines(stack.report(), console.width)
    except (NvrxError, OSError) as error:
        lines = [f"alerts: Prometheus did not answer: {error}"]
    for line in lines:
        console.print(line)


def _options(run_dir: Path, faults: tuple[str, ...], summary: Path | None, metrics_port: int | None) -> RunOptions:
    return RunOptions(
        run="demo",
        run_dir=run_dir,
        standbys=1,
        save_every=SAVE_EVERY,
        hot_every=1,
        hot_slots=3,
        keep=3,
        on_busy="skip",
        write_bandwidth_bytes_s=None,
        fault_specs=faults,
        limits=Limits(deadlines=Deadlines(step_s=STEP_DEADLINE_S)),
        metrics_host="127.0.0.1",
        metrics_port=metrics_port,
        otlp_endpoint=None,
        linger=True,
        summary=summary,
        start_fresh=False,
    )


def _monitor(entered: contextlib.ExitStack, metrics_port: int) -> MonitoringStack | None:
    """Start Prometheus and Alertmanager around the run; None, said in a line, where that fails."""
    console = make_console()
    target = ScrapeTarget(url=f"http://127.0.0.1:{metrics_port}/metrics", labels=LOCAL_LABELS)
    config = StackConfig(targets=(target,), scrape_interval_s=SCRAPE_INTERVAL_S)
    try:
        stack = entered.enter_context(MonitoringStack(config))
    except (NvrxError, OSError) as error:
        console.print(f"going on without Prometheus: {error}")
        return None
    console.print(f"Prometheus at {stack.prometheus_url} and Alertmanager at {stack.alertmanager_url}, for this run")
    return stack


def _free_port() -> int:
    """A port that was free a moment ago: Prometheus must know it before the run starts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
