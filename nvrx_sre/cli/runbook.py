"""`nvrx-sre runbook`: prints the page of an alert, also where there is no network."""

from __future__ import annotations

import click

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.monitoring import assets


@click.command("runbook")
@click.argument("name", required=False)
def command(name: str | None) -> int:
    """Print the runbook of the alert NAME; without NAME, list them."""
    click.echo("\n".join(assets.runbook_names()) if name is None else assets.runbook_text(name).rstrip("\n"))
    return ExitCode.FINISHED
