"""`nvrx-sre generate`: dashboards, alert rules and their reference from the metric catalog, in three forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from nvrx_sre.cli.pairs import pairs_of
from nvrx_sre.core.errors import ExitCode, UserError
from nvrx_sre.monitoring import assets, generate
from nvrx_sre.monitoring.generate import Format
from nvrx_sre.monitoring.manifests import ManifestOptions
from nvrx_sre.monitoring.values import Values, load_values


@click.command("generate")
@click.option("--format", "style", type=click.Choice([item.value for item in Format]), default=Format.FILES.value,
              show_default=True, help="Plain files, manifests for the operator, or a provisioning folder.")  # fmt: skip
@click.option("--check", is_flag=True, help="Write nothing; exit 70 if a file differs from its generator.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Directory to write to or check.  [default: the checkout; an installed package needs it]",
)
@click.option("--values", "values_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="YAML file that overrides values of alerts/values.yaml.")  # fmt: skip
@click.option("--runbook-base-url", metavar="URL", help="Where the site serves runbooks/; beats --values.")
@click.option("--group-labels", metavar="A,B,run", help="What one alert is about; beats --values.")
@click.option("--cluster", default="default", show_default=True, metavar="NAME",
              help="Cluster label of the PodMonitor.")  # fmt: skip
@click.option("--manifest-label", "labels", multiple=True, metavar="NAME=VALUE",
              help="Label by which the site's operator selects manifests; repeatable.")  # fmt: skip
@click.option("--scrape-ca-secret", default="", metavar="NAME",
              help="Secret (key ca.crt) of the CA of launchers that serve with TLS.")  # fmt: skip
@click.option("--scrape-server-name", default="", metavar="NAME", help="Name in the launchers' certificates.")
@click.option("--scrape-login-secret", default="", metavar="NAME",
              help="Secret (keys username, password) of launchers with --metrics-users.")  # fmt: skip
def command(style: str, check: bool, out: Path | None, values_path: Path | None, **options: Any) -> int:
    """Write dashboards/ and alerts/ from the metric catalog.

    Without --out into the checkout that this package is, with docs/reference/alerts.md.
    """
    chosen = Format(style)
    if out is None and chosen is not Format.FILES:
        raise UserError(f"--format {chosen} writes into a directory of its own: give --out DIR")
    root = out if out is not None else assets.assets_root()
    if out is None and not assets.is_checkout(root) and not check:
        raise UserError("this is an installed package: say where to write with --out DIR")
    values = site_values(values_path, options["runbook_base_url"], options["group_labels"])
    scrape = {name: value for name, value in options.items() if name.startswith("scrape_")}
    manifest = manifest_options(chosen, options["cluster"], options["labels"], scrape)
    files = generate.formatted(chosen, values, manifest)
    if chosen is Format.FILES and assets.is_checkout(root):
        files = generate.outputs(values, with_docs=True)
    others = generate.other_values(root, values) if assets.VALUES_FILE in files else []
    if check:
        return _check(root, files, others, "" if values == Values() and not others else " with the same --values")
    changed = generate.write(root, files)
    for item in others:
        click.echo(f"changed {item}")
    for path in changed:
        click.echo(f"wrote {root / path}")
    click.echo(f"{len(files)} generated files in {root}, {len(changed)} changed")
    return ExitCode.FINISHED


def site_values(path: Path | None, runbook_base_url: str | None, group_labels: str | None) -> Values:
    """Values of the file, or the defaults, with what the command line says. Raises `UserError`."""
    values = Values() if path is None else load_values(path)
    changes: dict[str, Any] = {}
    if runbook_base_url is not None:
        changes["runbook_base_url"] = runbook_base_url
    if group_labels is not None:
        changes["group_labels"] = tuple(item.strip() for item in group_labels.split(","))
    return dataclasses.replace(values, **changes)


def manifest_options(
    style: Format, cluster: str, labels: tuple[str, ...], scrape: Mapping[str, str]
) -> ManifestOptions:
    """Options of the operator's manifests. Raises `UserError` for what does not fit, or would be ignored."""
    options = ManifestOptions(cluster=cluster, labels=pairs_of("--manifest-label", labels), **scrape)
    if style is not Format.OPERATOR and options != ManifestOptions():
        raise UserError(
            f"--cluster, --manifest-label and --scrape-* belong to --format {Format.OPERATOR}, not to {style}"
        )
    return options


def _check(root: Path, files: dict[str, str], others: Sequence[str], how: str) -> int:
    """Exit code after naming each file that differs; `how` it was generated belongs to the command that mends it."""
    found = generate.drift(root, files)
    if others:
        file = root / assets.VALUES_FILE
        click.echo(f"{file}: generated with other values; `--values {file}` checks against them", err=True)
        for item in others:
            click.echo(f"  {item}", err=True)
    for drift in found:
        click.echo(f"{root / drift.path}: {drift.reason}; run `nvrx-sre generate`{how}", err=True)
    if found:
        return ExitCode.INTERNAL
    click.echo(f"{len(files)} generated files in {root} are as their generator writes them")
    return ExitCode.FINISHED
