"""`nvrx-sre generate`: dashboards, alert rules and their reference from the metric catalog."""

from __future__ import annotations

from pathlib import Path

import click

from nvrx_sre.core.errors import ExitCode, UserError
from nvrx_sre.monitoring import assets, generate
from nvrx_sre.monitoring.values import Values, load_values


@click.command("generate")
@click.option("--check", is_flag=True, help="Write nothing; exit 70 if a file differs from its generator.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Directory to write to or check."
)
@click.option("--values", "values_path", type=click.Path(path_type=Path, dir_okay=False),
              help="YAML file that overrides values of alerts/values.yaml.")  # fmt: skip
def command(check: bool, out: Path | None, values_path: Path | None) -> int:
    """Write dashboards/ and alerts/ from the metric catalog.

    In a checkout also docs/reference/alerts.md.
    """
    root = out if out is not None else assets.assets_root()
    if out is None and not assets.is_checkout(root) and not check:
        raise UserError("this is an installed package: say where to write with --out DIR")
    values = Values() if values_path is None else load_values(values_path)
    files = generate.outputs(values, with_docs=assets.is_checkout(root))
    if check:
        return _check(root, files)
    changed = generate.write(root, files)
    for path in changed:
        click.echo(f"wrote {root / path}")
    click.echo(f"{len(files)} generated files, {len(changed)} changed")
    return ExitCode.FINISHED


def _check(root: Path, files: dict[str, str]) -> int:
    found = generate.drift(root, files)
    for item in found:
        click.echo(f"{root / item.path}: {item.reason}; run `nvrx-sre generate`", err=True)
    if found:
        return ExitCode.INTERNAL
    click.echo(f"{len(files)} generated files are as their generator writes them")
    return ExitCode.FINISHED
