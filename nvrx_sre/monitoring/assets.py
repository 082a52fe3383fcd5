"""Where dashboards, alert rules and runbooks lie: at the top of a checkout, inside the package in a wheel.

Pure look-up; reads directory entries, never writes. Thread safety: no state.
"""

from __future__ import annotations

from pathlib import Path

from nvrx_sre.core.errors import UserError

PACKAGE_ROOT = Path(__file__).resolve().parent.parent
ASSET_KINDS = ("dashboards", "alerts", "runbooks")
RULES_FILE = "alerts/nvrx-sre.rules.yaml"
KUBERNETES_RULES_FILE = "alerts/nvrx-sre.kubernetes.rules.yaml"
"""Optional: needs kube-state-metrics."""
ALERTMANAGER_FILE = "alerts/alertmanager.yaml"
TEMPLATES_FILE = "alerts/nvrx-sre.tmpl"
VALUES_FILE = "alerts/values.yaml"
RUN_DASHBOARD_FILE = "dashboards/run.json"
ALERT_REFERENCE_FILE = "docs/reference/alerts.md"


def assets_root() -> Path:
    """Directory that holds dashboards/, alerts/ and runbooks/: `_assets` of a wheel, else the checkout.

    Raises `UserError` when neither is complete.
    """
    for root in (PACKAGE_ROOT / "_assets", PACKAGE_ROOT.parent):
        if all((root / kind).is_dir() for kind in ASSET_KINDS):
            return root
    raise UserError(
        f"dashboards, alerts and runbooks are neither in {PACKAGE_ROOT / '_assets'} nor in {PACKAGE_ROOT.parent}: "
        "install the package again"
    )


def is_checkout(root: Path) -> bool:
    """True if `root` is a source tree, whose docs/reference is generated too."""
    return (root / "pyproject.toml").is_file()


def asset(relative: str) -> Path:
    """Path of one shipped file, e.g. `RULES_FILE`. Raises `UserError` if it is missing."""
    path = assets_root() / relative
    if not path.is_file():
        raise UserError(f"{path} is missing: run `nvrx-sre generate`, or install the package again")
    return path


def runbook_names() -> list[str]:
    """Names of the runbooks, which are the names of the alerts, sorted."""
    return sorted(path.stem for path in (assets_root() / "runbooks").glob("Nvrx*.md"))


def runbook_text(name: str) -> str:
    """Markdown of one runbook. Raises `UserError` for a name that has none."""
    if name not in runbook_names():
        raise UserError(f"there is no runbook {name!r}: known are {', '.join(runbook_names())}")
    return asset(f"runbooks/{name}.md").read_text(encoding="utf-8")
