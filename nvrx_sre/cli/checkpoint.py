"""`nvrx-sre checkpoint list|verify RUN_DIR`: what is restorable, and why the rest is not.

`list` reads manifests and sizes and returns at once; `verify` reads every byte. Both only read, also beside a
live run. Neither loads torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from nvrx_sre.checkpoint import discover as discovery
from nvrx_sre.checkpoint import manifest
from nvrx_sre.checkpoint.discover import Discovery, Found, Rejected
from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.core.errors import CheckpointCorrupt, UserError

_RUN_DIR = click.argument("run_dir", type=click.Path(path_type=Path), metavar="RUN_DIR")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@click.group("checkpoint")
def command() -> None:
    """List and verify the durable checkpoints of a run."""


@command.command("list")
@_RUN_DIR
@_JSON
def list_command(run_dir: Path, as_json: bool) -> int:
    """Show what can be restored, newest first, and why the rest cannot."""
    found = look(run_dir)
    aside = moved_aside(run_dir)
    now_ns = SystemClock().wall_ns()
    if as_json:
        click.echo(json.dumps(as_dict(found, aside, now_ns), indent=1, sort_keys=True))
        return 0
    for line in describe(found, aside, now_ns):
        click.echo(line)
    return 0


@command.command("verify")
@_RUN_DIR
@_JSON
def verify_command(run_dir: Path, as_json: bool) -> int:
    """Read every byte of every checkpoint; exit 1 if any is damaged."""
    found = look(run_dir)
    good: list[Found] = []
    bad: list[Rejected] = list(found.rejected)
    checked = [*found.restorable, *found.abandoned]
    with progress(sum(item.size_bytes for item in checked), quiet=as_json) as advance:
        for item in checked:
            problem = verify_one(item, advance)
            if problem is None:
                good.append(item)
            else:
                bad.append(problem)
    if as_json:
        result = {"good": [item.directory for item in good], "bad": [asdict(item) for item in bad]}
        click.echo(json.dumps(result, indent=1, sort_keys=True))
    else:
        for line in _verdicts(good, bad):
            click.echo(line)
    return 1 if bad else 0


def look(run_dir: Path) -> Discovery:
    """What lies in the run directory. Raises `UserError` if it is none."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not there: name the run directory (--run-dir of the run)")
    if not (run_dir / "run.json").exists() and not discovery.checkpoints_path(run_dir).is_dir():
        raise UserError(f"{run_dir} is not a run directory: it has neither run.json nor checkpoints/")
    return discovery.discover(run_dir, discovery.read_fences(run_dir))


def moved_aside(run_dir: Path) -> list[str]:
    """Names in `checkpoints/rejected/`."""
    rejected = discovery.checkpoints_path(run_dir) / discovery.REJECTED
    return sorted(path.name for path in rejected.iterdir()) if rejected.is_dir() else []


def verify_one(item: Found, advance: Callable[[int], None]) -> Rejected | None:
    """Checksum one checkpoint; what is wrong with it, None if nothing. Blocks for the read."""
    try:
        manifest.verify_files(item.path, item.manifest, on_file=lambda _, size_bytes: advance(size_bytes))
    except CheckpointCorrupt as error:
        return Rejected(directory=item.directory, step=item.step, reason=error.reason, message=str(error))
    return None


@contextmanager
def progress(total_bytes: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal; nothing elsewhere, so that logs stay lines."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=total_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)


def describe(found: Discovery, aside: list[str], now_ns: int) -> Iterator[str]:
    """The listing as lines. Pure."""
    if found.restorable:
        yield f"{'step':>10}  {'generation':>10}  {'size':>10}  {'age':>8}  {'verified':8}  directory"
    else:
        yield "nothing is restorable"
    for item in found.restorable:
        yield (
            f"{item.step:>10}  {item.generation:>10}  {_size(item.size_bytes):>10}  "
            f"{_age(now_ns - item.captured_ns):>8}  {'yes' if item.verified else 'no':8}  {item.directory}"
        )
    for item in found.abandoned:
        yield f"abandoned    {item.directory}: a later generation rolled back below step {item.step}"
    for rejected in found.rejected:
        yield f"unusable     {rejected.directory}: {rejected.reason}: {rejected.message}"
    for name in found.interrupted:
        yield f"interrupted  {name}: a save that has not committed"
    for name in aside:
        yield f"moved aside  {discovery.REJECTED}/{name}"


def as_dict(found: Discovery, aside: list[str], now_ns: int) -> dict[str, Any]:
    """The listing as JSON-ready dict. Pure."""
    return {
        "restorable": [_found_dict(item, now_ns) for item in found.restorable],
        "abandoned": [_found_dict(item, now_ns) for item in found.abandoned],
        "rejected": [asdict(item) for item in found.rejected],
        "interrupted": found.interrupted,
        "moved_aside": aside,
    }


def _found_dict(item: Found, now_ns: int) -> dict[str, Any]:
    return {
        "directory": item.directory,
        "step": item.step,
        "generation": item.generation,
        "epoch": item.epoch,
        "world_size": item.world_size,
        "size_bytes": item.size_bytes,
        "captured_ns": item.captured_ns,
        "age_s": round(seconds(now_ns - item.captured_ns), 3),
        "verified": item.verified,
    }


def _verdicts(good: list[Found], bad: list[Rejected]) -> Iterator[str]:
    for item in good:
        files = len(item.manifest.files)
        yield f"good      {item.directory}  step {item.step}, {_size(item.size_bytes)}, {files} files"
    for rejected in bad:
        yield f"damaged   {rejected.directory}: {rejected.reason}: {rejected.message}"
    if not good and not bad:
        yield "no checkpoint has been committed"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def _age(age_ns: int) -> str:
    age_s = max(0, round(seconds(age_ns)))
    if age_s < 120:
        return f"{age_s} s"
    if age_s < 7200:
        return f"{age_s // 60} min"
    return f"{age_s // 3600} h" if age_s < 172_800 else f"{age_s // 86_400} d"
