"""`nvrx-sre checkpoint list|verify|export|prune RUN_DIR`: what is restorable, and what to do with it.

`list` reads manifests and sizes and returns at once; `verify` reads every byte; both only read, also beside a live
run. `export` writes one file elsewhere; `prune` deletes, after it has said what, and never while a launcher owns the
run. Only `export` loads torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from nvrx_sre.checkpoint import discover as discovery
from nvrx_sre.checkpoint import manifest, prune, retention
from nvrx_sre.checkpoint.discover import Discovery, Found, Rejected
from nvrx_sre.cli import checkpoint_view as view
from nvrx_sre.cli.narrate import bytes_text
from nvrx_sre.cli.output_file import check_output_file
from nvrx_sre.cli.ownership import check_unowned, hot_state, live_launcher
from nvrx_sre.core.clock import SystemClock
from nvrx_sre.core.errors import CheckpointCorrupt, UserError
from nvrx_sre.core.identity import RUN_FILE, check_run_dir

DEFAULT_KEEP = 3
_RUN_DIR = click.argument("run_dir", type=click.Path(path_type=Path), metavar="RUN_DIR")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")

Advance = Callable[[int], None]


@click.group("checkpoint")
def command() -> None:
    """List, verify, export and prune the checkpoints of a run."""


@command.command("list")
@_RUN_DIR
@_JSON
def list_command(run_dir: Path, as_json: bool) -> int:
    """Show what can be restored, newest first, and why the rest cannot."""
    listing = view.Listing(
        found=look(run_dir),
        aside=moved_aside(run_dir),
        hot=hot_state(run_dir),
        is_live=live_launcher(run_dir) is not None,
        now_ns=SystemClock().wall_ns(),
    )
    if as_json:
        click.echo(json.dumps(listing.as_dict(), indent=1, sort_keys=True))
    else:
        click.echo("\n".join(listing.lines()))
    return 0


@command.command("verify")
@_RUN_DIR
@click.argument("steps", type=click.IntRange(0), nargs=-1, metavar="[STEP]...")
@_JSON
def verify_command(run_dir: Path, steps: tuple[int, ...], as_json: bool) -> int:
    """Read every byte of every checkpoint (or those of STEP...); exit 1 if any is damaged."""
    found = look(run_dir)
    bad = [item for item in found.rejected if not steps or item.step in steps]
    checked = [item for item in (*found.restorable, *found.abandoned) if not steps or item.step in steps]
    _check_steps(steps, [*(item.step for item in bad), *(item.step for item in checked)], found)
    good: list[Found] = []
    gone: list[Found] = []

    def say(result: Found | Rejected, *, is_gone: bool = False) -> None:
        if not as_json:
            click.echo(view.verdict(result, is_gone=is_gone))

    for rejected in bad:
        say(rejected)
    with progress("verifying", sum(item.size_bytes for item in checked), quiet=as_json) as advance:
        for item in checked:
            problem = verify_one(item, advance)
            is_gone = problem is not None and not item.path.is_dir()  # the retention of a live run was faster
            if is_gone:
                gone.append(item)
            elif problem is not None:
                bad.append(problem)
            else:
                good.append(item)
            say(problem or item, is_gone=is_gone)
    if as_json:
        names = {"good": [item.directory for item in good], "gone": [item.directory for item in gone]}
        click.echo(json.dumps({**names, "bad": [asdict(item) for item in bad]}, indent=1, sort_keys=True))
    elif not good and not bad and not gone:
        click.echo("no checkpoint has been committed")
    return 1 if bad else 0


@command.command("export")
@_RUN_DIR
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option("--step", type=click.IntRange(0), metavar="N", help="Step to export.  [default: the newest restorable]")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def export_command(run_dir: Path, out: Path, step: int | None, force: bool) -> int:
    """Write a checkpoint to one file: OUT ends in .pt, .pth or .safetensors."""
    found = look(run_dir)
    chosen = choose(found, step)
    check_output_file(out, is_renamed=True)
    # Imported here so that the other commands stay without torch.
    from nvrx_sre.checkpoint import export

    with progress("verifying", chosen.size_bytes, quiet=False) as advance:
        result = export.export(chosen, out, force=force, on_file=lambda _, size_bytes: advance(size_bytes))
    click.echo("\n".join(view.exported(result)))
    return 0


@command.command("prune")
@_RUN_DIR
@click.option(
    "--keep",
    type=click.IntRange(retention.KEEP_MIN),
    default=DEFAULT_KEEP,
    show_default=True,
    metavar="N",
    help="Verified checkpoints to keep.",
)
@click.option("--yes", is_flag=True, help="Delete; without it, only say what would be deleted.")
@_JSON
def prune_command(run_dir: Path, keep: int, yes: bool, as_json: bool) -> int:
    """Delete old, abandoned and unfinished checkpoints of a run that no launcher owns."""
    found = look(run_dir)
    planned = prune.plan(run_dir, found, keep)
    removed: list[prune.Removal] = []
    check_unowned(run_dir)
    if not as_json:
        click.echo("\n".join(view.removals(planned)) if planned else "nothing to delete")
    if yes:
        removed += prune.execute(run_dir, found, planned, lambda: check_unowned(run_dir))
    if as_json:
        result = {"planned": [asdict(item) for item in planned], "removed": [item.directory for item in removed]}
        click.echo(json.dumps(result, indent=1, sort_keys=True))
    elif planned:
        total = bytes_text(sum(item.size_bytes for item in planned))
        click.echo(f"deleted {len(removed)}, {total} freed" if yes else f"{total} in all; delete with --yes")
    return 0


def look(run_dir: Path) -> Discovery:
    """What lies in the run directory. Raises `UserError` if it is none."""
    check_run_dir(run_dir)
    if not (run_dir / RUN_FILE).exists() and not discovery.checkpoints_path(run_dir).is_dir():
        raise UserError(f"{run_dir} is not a run directory: it has neither {RUN_FILE} nor checkpoints/")
    return discovery.discover(run_dir, discovery.read_fences(run_dir))


def choose(found: Discovery, step: int | None) -> Found:
    """The newest restorable checkpoint, of `step` if that is given. Raises `UserError` if there is none."""
    if step is not None:
        _check_steps([step], [item.step for item in found.restorable], found)
    elif not found.restorable:
        raise UserError("nothing is restorable: `nvrx-sre checkpoint list` says why")
    return next(item for item in found.restorable if step is None or item.step == step)


def moved_aside(run_dir: Path) -> list[str]:
    """Names in `checkpoints/rejected/`."""
    rejected = discovery.checkpoints_path(run_dir) / discovery.REJECTED
    return sorted(path.name for path in rejected.iterdir()) if rejected.is_dir() else []


def verify_one(item: Found, advance: Advance) -> Rejected | None:
    """Checksum one checkpoint; what is wrong with it, None if nothing. Blocks for the read."""
    try:
        manifest.verify_files(item.path, item.manifest, on_file=lambda _, size_bytes: advance(size_bytes))
    except CheckpointCorrupt as error:
        return Rejected(directory=item.directory, step=item.step, reason=error.reason, message=str(error))
    return None


@contextmanager
def progress(label: str, total_bytes: int, *, quiet: bool) -> Iterator[Advance]:
    """A bar on stderr where that is a terminal; nothing elsewhere, so that logs stay lines."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)


def _check_steps(wanted: Sequence[int], present: Sequence[int], found: Discovery) -> None:
    """Raise `UserError` for a wanted step that is not there."""
    missing = next((step for step in wanted if step not in present), None)
    if missing is not None:
        known = ", ".join(str(item.step) for item in found.restorable) or "none"
        raise UserError(f"there is no usable checkpoint of step {missing}; restorable are: {known}")
