"""Options that every command that starts a launcher has, and the `RunConfig` they build.

Model: `run_options` decorates a command; its values arrive in one `RunOptions`. Values are checked here as far
as they can be without touching the run directory; the launcher checks the rest.

Must not: import torch, or start anything.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from nvrx_sre.cli import config_file
from nvrx_sre.cli.main import FILE_KEY
from nvrx_sre.cli.output_file import check_output_file
from nvrx_sre.core.errors import UserError
from nvrx_sre.core.ids import check_run_name, run_name_from
from nvrx_sre.core.limits import Deadlines, Limits
from nvrx_sre.faults.plan import load_plan
from nvrx_sre.launcher.config import ON_BUSY, NodesConfig, RunConfig
from nvrx_sre.telemetry.endpoint import EndpointSecurity
from nvrx_sre.telemetry.labels import RankMetrics
from nvrx_sre.telemetry.otlp import traces_url

LIMITS_KEY = "nvrx_sre.limits"
DEFAULT_RUNS = Path("runs")
AUTO = "auto"
WRITE_BANDWIDTH_MB_S_MIN = 0.001


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Values of the shared options, checked."""

    run: str
    run_dir: Path
    standbys: int
    save_every: int
    hot_every: int | None
    """None: chosen by measurement."""
    hot_slots: int
    keep: int
    on_busy: str
    write_bandwidth_bytes_s: float | None
    fault_specs: tuple[str, ...]
    limits: Limits
    metrics_host: str
    metrics_port: int | None
    otlp_endpoint: str | None
    linger: bool
    summary: Path | None
    start_fresh: bool
    metrics_security: EndpointSecurity = field(default_factory=EndpointSecurity)
    allow_brake: bool = False
    rank_metrics: RankMetrics | None = None
    labels: dict[str, str] = field(default_factory=dict)
    min_world_size: int | None = None
    """None: every rank is needed."""
    world_multiple: int = 1
    tunes_deadlines: bool = False


def _load_config(ctx: click.Context, _: click.Parameter, value: Path | None) -> Path | None:
    """Eager: the file's values become defaults before any other option is read."""
    if value is not None:
        loaded = config_file.load(value, [str(parameter.name) for parameter in ctx.command.params])
        ctx.default_map = {**(ctx.default_map or {}), **loaded.options}
        ctx.meta[LIMITS_KEY] = loaded.limits
        ctx.meta[FILE_KEY] = str(value)
    return value


class HotEvery(click.ParamType[int | str]):
    """A number of steps, or `auto`."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == AUTO or isinstance(value, int):
            return value
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number of steps nor 'auto'", param, ctx)
        if number < 0:
            self.fail(f"{number} is below 0 (0 switches the hot tier off)", param, ctx)
        return number


_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_load_config,
        metavar="FILE",
        help="TOML or YAML file of options and limits; explicit arguments beat it.",
    ),
    click.option(
        "--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="Run directory.  [default: runs/NAME]"
    ),
    click.option("--name", metavar="NAME", help="Run name.  [default: the run directory's, else the script's]"),
    click.option(
        "--standbys", type=click.IntRange(0), default=1, show_default=True, metavar="N", help="Warm spare processes."
    ),
    click.option(
        "--min-world-size",
        type=click.IntRange(1),
        metavar="N",
        help="Go on with as few ranks when a device fails again and again.  [default: all]",
    ),
    click.option(
        "--world-multiple",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        metavar="N",
        help="Ranks that can only take part together.",
    ),
    click.option(
        "--deadlines",
        type=click.Choice(["fixed", AUTO]),
        default="fixed",
        show_default=True,
        help="Progress deadlines as configured, or tightened to a multiple of what phases take.",
    ),
    click.option(
        "--save-every",
        type=click.IntRange(1),
        default=50,
        show_default=True,
        metavar="N",
        help="Steps between durable saves.",
    ),
    click.option(
        "--hot-every",
        type=HotEvery(),
        default=1,
        show_default=True,
        metavar="N|auto",
        help="Steps between hot captures; 0 switches the hot tier off, auto keeps their cost at 1 % of the step.",
    ),
    click.option(
        "--hot-slots",
        type=click.IntRange(2, 3),
        default=3,
        show_default=True,
        metavar="2|3",
        help="Hot slots of each rank; with 2, captures pause while a durable save is written.",
    ),
    click.option(
        "--keep",
        type=click.IntRange(2),
        default=3,
        show_default=True,
        metavar="N",
        help="Verified durable checkpoints to keep.",
    ),
    click.option(
        "--on-busy",
        type=click.Choice(ON_BUSY),
        default="skip",
        show_default=True,
        help="A due save that finds the writer busy: skip it and save the newest step when it is free, or wait.",
    ),
    click.option(
        "--write-bandwidth",
        type=click.FloatRange(0, min_open=True),
        metavar="MB_S",
        help="Throttle of the durable writer in MB/s.",
    ),
    click.option(
        "--step-deadline",
        type=click.FloatRange(0, min_open=True),
        metavar="S",
        help="Seconds without progress inside a step after which a rank counts as hung.  "
        f"[default: {Deadlines().step_s:g}]",
    ),
    click.option(
        "--fault", multiple=True, metavar="SPEC", help="Inject KIND@RANK:STEP[=PARAMETER][/PHASE][xN|x*]; repeatable."
    ),
    click.option(
        "--fault-plan",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="File of fault specs: one a line, YAML or JSON.",
    ),
    click.option(
        "--metrics-port", type=click.IntRange(1, 65_535), metavar="P", help="Port of /metrics.  [default: a free one]"
    ),
    click.option("--metrics-host", default="127.0.0.1", show_default=True, metavar="HOST", help="Address of /metrics."),
    click.option(
        "--metrics-linger",
        type=click.FloatRange(0),
        metavar="S",
        help="Longest stay of a scraped /metrics after the end, in seconds; 0 may page for a good end.  [default: 65]",
    ),
    click.option(
        "--otlp-endpoint",
        metavar="URL",
        help="Send spans by OTLP/HTTP, best effort; without a path, to URL/v1/traces.",
    ),
    click.option("--summary", type=click.Path(path_type=Path), metavar="FILE", help="Write the run's summary as JSON."),
    click.option("--start-fresh", is_flag=True, help="Begin at step 0 although checkpoints exist; they are kept."),
    click.option(
        "--metrics-tls-cert", type=click.Path(path_type=Path), metavar="FILE", help="Serve /metrics with TLS (PEM)."
    ),
    click.option(
        "--metrics-tls-key", type=click.Path(path_type=Path), metavar="FILE", help="Key of --metrics-tls-cert."
    ),
    click.option(
        "--metrics-users",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Private file of user:password lines that may scrape.",
    ),
    click.option(
        "--rank-metrics",
        type=click.Choice([str(mode) for mode in RankMetrics]),
        help="Export each rank, the extremes of all, or none.  [default: all up to 64 ranks, then summary]",
    ),
    click.option(
        "--label",
        "labels",
        multiple=True,
        metavar="NAME=VALUE",
        help="team=TEXT or priority=prod|dev, for alerts; repeatable.",
    ),
    click.option("--allow-brake", is_flag=True, help="The site's `nvrx-sre brake` may halt this run."),
)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: add the shared options and hand them over as `options=RunOptions`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **values: Any) -> Any:
        shared = {name: values.pop(name) for name in _SHARED}
        return function(*args, options=_build(shared), **values)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


_SHARED = (
    "run_dir",
    "name",
    "standbys",
    "min_world_size",
    "world_multiple",
    "deadlines",
    "save_every",
    "hot_every",
    "hot_slots",
    "keep",
    "on_busy",
    "write_bandwidth",
    "step_deadline",
    "fault",
    "fault_plan",
    "metrics_port",
    "metrics_host",
    "metrics_linger",
    "otlp_endpoint",
    "summary",
    "start_fresh",
    "metrics_tls_cert",
    "metrics_tls_key",
    "metrics_users",
    "allow_brake",
    "rank_metrics",
    "labels",
)


def _build(values: dict[str, Any]) -> RunOptions:
    run, run_dir = _place(values["name"], values["run_dir"])
    check_output_file(values["summary"], made=run_dir)
    linger_s: float | None = values["metrics_linger"]
    fields_of = {
        section: dict(content) for section, content in click.get_current_context().meta.get(LIMITS_KEY, {}).items()
    }
    if linger_s:
        fields_of.setdefault("telemetry", {})["metrics_linger_s"] = linger_s
    bandwidth_mb_s = values["write_bandwidth"]
    # A range lets through what is no number, and infinity is said by leaving the option out.
    if bandwidth_mb_s is not None and not WRITE_BANDWIDTH_MB_S_MIN <= bandwidth_mb_s < math.inf:
        raise UserError(
            f"--write-bandwidth {bandwidth_mb_s:g}: give MB/s from {WRITE_BANDWIDTH_MB_S_MIN:g} on, or leave it out"
        )
    return RunOptions(
        run=run,
        run_dir=run_dir,
        standbys=values["standbys"],
        save_every=values["save_every"],
        hot_every=None if values["hot_every"] == AUTO else values["hot_every"],
        hot_slots=values["hot_slots"],
        keep=values["keep"],
        on_busy=values["on_busy"],
        write_bandwidth_bytes_s=None if bandwidth_mb_s is None else bandwidth_mb_s * 1e6,
        fault_specs=_fault_specs(values["fault"], values["fault_plan"]),
        limits=config_file.build_limits(fields_of, values["step_deadline"]),
        metrics_host=values["metrics_host"],
        metrics_port=values["metrics_port"],
        otlp_endpoint=None if values["otlp_endpoint"] is None else traces_url(values["otlp_endpoint"]),
        linger=linger_s is None or linger_s > 0,
        summary=values["summary"],
        start_fresh=values["start_fresh"],
        metrics_security=EndpointSecurity(
            tls_cert=values["metrics_tls_cert"], tls_key=values["metrics_tls_key"], users=values["metrics_users"]
        ),
        allow_brake=values["allow_brake"],
        rank_metrics=None if values["rank_metrics"] is None else RankMetrics(values["rank_metrics"]),
        labels=dict(map(_label, values["labels"])),
        min_world_size=values["min_world_size"],
        world_multiple=values["world_multiple"],
        tunes_deadlines=values["deadlines"] == AUTO,
    )


LABEL_VALUES = {"team": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"), "priority": re.compile(r"prod|dev")}


def _label(text: str) -> tuple[str, str]:
    """Name and value of `NAME=VALUE`. Raises `UserError` for another name, or a value that it cannot have."""
    name, _, value = text.partition("=")
    if name not in LABEL_VALUES or not LABEL_VALUES[name].fullmatch(value):
        raise UserError(f"--label {text!r}: use team=TEXT (letters, digits, . _ -, up to 63) or priority=prod|dev")
    return name, value


def _place(name: str | None, run_dir: Path | None) -> tuple[str, Path]:
    """Run name and directory; each is derived from the other where it is not given."""
    if name is not None:
        check_run_name(name)
    if run_dir is None:
        name = name or "train"
        return name, (DEFAULT_RUNS / name).absolute()
    return name or run_name_from(run_dir.absolute().name), run_dir.absolute()


def _fault_specs(given: tuple[str, ...], plan: Path | None) -> tuple[str, ...]:
    """Specs of `--fault`, then those of the plan's file."""
    return (*given, *map(str, load_plan(plan))) if plan is not None else given


def build_run_config(
    options: RunOptions,
    *,
    command: tuple[str, ...],
    nproc: int,
    config_items: dict[str, str],
    exact_replay: bool = False,
    nodes: NodesConfig | None = None,
) -> RunConfig:
    """The launcher's configuration. Raises `UserError` where values do not fit together."""
    num_least = max(nproc, 1) * (1 if nodes is None else nodes.min_nodes)
    return RunConfig(
        run=options.run,
        run_dir=options.run_dir,
        command=command,
        nproc=nproc,
        min_world_size=num_least if options.min_world_size is None else options.min_world_size,
        world_multiple=options.world_multiple,
        tunes_deadlines=options.tunes_deadlines,
        num_standbys=options.standbys,
        save_every=options.save_every,
        hot_every=options.hot_every,
        hot_slots=options.hot_slots,
        keep=options.keep,
        on_busy=options.on_busy,
        write_bandwidth_bytes_s=options.write_bandwidth_bytes_s,
        fault_specs=options.fault_specs,
        config_items=config_items,
        exact_replay=exact_replay,
        limits=options.limits,
        metrics_host=options.metrics_host,
        metrics_port=options.metrics_port,
        otlp_endpoint=options.otlp_endpoint,
        summary=None if options.summary is None else options.summary.absolute(),
        start_fresh=options.start_fresh,
        metrics_security=options.metrics_security,
        allow_brake=options.allow_brake,
        rank_metrics=options.rank_metrics,
        labels=options.labels,
        linger=options.linger,
        nodes=nodes,
    )
