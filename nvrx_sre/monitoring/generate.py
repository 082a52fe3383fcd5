"""Writes what is generated, and tells when a file differs from its generator.

Model: `outputs` maps each relative path to its text; `write` and `drift` compare it with a directory. The text
is a function of catalog and values alone, so two machines write the same bytes. Runbooks are written by hand
and are not outputs.

Blocking: file I/O. Raises `UserError` when a directory cannot be written.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nvrx_sre.core.errors import UserError
from nvrx_sre.monitoring import assets
from nvrx_sre.monitoring.alertmanager import DEADMAN_TIMEOUT_S, alertmanager_config
from nvrx_sre.monitoring.alerts import kubernetes_document, rules_document
from nvrx_sre.monitoring.dashboards import dashboard_files
from nvrx_sre.monitoring.manifests import ManifestOptions, grafana_provisioning, operator_manifests
from nvrx_sre.monitoring.notices import notification_templates
from nvrx_sre.monitoring.promql import duration
from nvrx_sre.monitoring.runbooks import alert_reference
from nvrx_sre.monitoring.values import Values, load_values, shown, values_file
from nvrx_sre.monitoring.yaml_files import YAML_HEADER, yaml_text


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A file that is not what its generator writes."""

    path: str
    reason: str
    """One line: missing, or the first line that differs."""


def rules_file(values: Values) -> str:
    """alerts/nvrx-sre.rules.yaml."""
    return YAML_HEADER + yaml_text(rules_document(values))


def kubernetes_rules_file(values: Values) -> str:
    """alerts/nvrx-sre.kubernetes.rules.yaml."""
    optional = "# Optional: kube-state-metrics with --metric-labels-allowlist=pods=[nvrx-sre/run].\n"
    return YAML_HEADER + optional + yaml_text(kubernetes_document(values))


def outputs(values: Values, *, with_docs: bool) -> dict[str, str]:
    """Relative path -> text of everything that is generated; the reference page only for a source tree."""
    example = (
        f"{YAML_HEADER}# An example to merge into a site's own: routes by severity, one group and one page a run.\n"
        "# The texts are in nvrx-sre.tmpl; secrets are files; the dead man's address and the channel are values.\n"
        f"# Let the dead man's switch call after {duration(DEADMAN_TIMEOUT_S)} without a beat of NvrxWatchdog.\n"
    )
    sources = (
        f"{YAML_HEADER}# What the files beside it were generated with, and where the defaults come from.\n"
        "# Give a copy to `nvrx-sre generate --values FILE`.\n\n"
    )
    files = {
        **dashboard_files(values),
        assets.RULES_FILE: rules_file(values),
        assets.KUBERNETES_RULES_FILE: kubernetes_rules_file(values),
        assets.ALERTMANAGER_FILE: example + yaml_text(alertmanager_config(values=values)),
        assets.TEMPLATES_FILE: notification_templates(),
        assets.VALUES_FILE: sources + values_file(values),
    }
    if with_docs:
        files[assets.ALERT_REFERENCE_FILE] = alert_reference(values)
    return files


class Format(StrEnum):
    """What is written."""

    FILES = "files"
    OPERATOR = "prometheus-operator"
    PROVISIONING = "grafana-provisioning"


def formatted(style: Format, values: Values, options: ManifestOptions) -> dict[str, str]:
    """Relative path -> text of everything in one of the forms; the reference page is in none."""
    files = outputs(values, with_docs=False)
    if style is Format.OPERATOR:
        return operator_manifests(files, values, options)
    return grafana_provisioning(files) if style is Format.PROVISIONING else files


def write(root: Path, files: dict[str, str]) -> list[str]:
    """Write the files that differ; their relative paths."""
    changed = [item.path for item in drift(root, files)]
    for path in changed:
        target = root / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(files[path], encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {target}: {error.strerror}") from error
    return changed


def drift(root: Path, files: dict[str, str]) -> list[Drift]:
    """Files under `root` that are missing or differ, sorted by path."""
    found = []
    for path, wanted in sorted(files.items()):
        target = root / path
        if not target.is_file():
            found.append(Drift(path=path, reason="missing"))
            continue
        actual = target.read_text(encoding="utf-8", errors="replace")
        if actual != wanted:
            found.append(Drift(path=path, reason=_first_difference(actual, wanted)))
    return found


def other_values(root: Path, values: Values) -> list[str]:
    """`name: old -> new` of each value with which the files under `root` were generated otherwise, as they say."""
    try:
        old = load_values(root / assets.VALUES_FILE)
    except UserError:
        return []  # none are there, or another version wrote them
    pairs = ((item.name, getattr(old, item.name), getattr(values, item.name)) for item in dataclasses.fields(Values))
    return [f"{name}: {shown(before)} -> {shown(after)}" for name, before, after in pairs if before != after]


def _first_difference(actual: str, wanted: str) -> str:
    lines = difflib.unified_diff(actual.splitlines(), wanted.splitlines(), n=0, lineterm="")
    changes = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return f"differs from its generator, first at: {changes[0].strip()}" if changes else "differs at its end"
