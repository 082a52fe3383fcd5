"""Manifests and provisioning: structure, and what is embedded checked by promtool and amtool."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvrx_sre.cli.main import main
from nvrx_sre.core.errors import InternalError, UserError
from nvrx_sre.monitoring import generate, manifests, promtool
from nvrx_sre.monitoring.alertmanager import alertmanager_config
from nvrx_sre.monitoring.manifests import ManifestOptions
from nvrx_sre.monitoring.values import Values

VALUES = Values()
OPTIONS = ManifestOptions(cluster="c1", labels={"release": "prom"})
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
OBJECT_BYTES_MAX = 1 << 20
"""etcd's limit, hence a ConfigMap's."""
APPLY_BYTES_MAX = 256 * 1024
"""kubectl apply keeps a copy of the object in an annotation of at most this size."""
FIELDS: dict[str, set[str]] = {
    "PrometheusRule": {"groups"},
    "PodMonitor": {"selector", "podMetricsEndpoints"},
    "AlertmanagerConfig": {"route", "receivers", "inhibitRules"},
}
"""Fields of each kind's `spec` that the operator's API (v1, v1alpha1) has and we use."""
ROUTE = {"receiver", "groupBy", "groupWait", "groupInterval", "repeatInterval", "matchers", "routes", "continue"}
INTEGRATIONS = {
    "pagerdutyConfigs": {
        *("routingKey", "sendResolved", "severity", "description", "client", "clientURL", "details"),
        "pagerDutyLinkConfigs",
    },
    "slackConfigs": {"apiURL", "channel", "sendResolved", "color", "title", "titleLink", "text"},
    "webhookConfigs": {"url", "sendResolved"},
}
GROUP = {"name", "interval", "rules"}
RULE = {"record", "alert", "expr", "for", "keep_firing_for", "labels", "annotations"}


@pytest.fixture(scope="module")
def plain() -> dict[str, str]:
    """What the manifests wrap."""
    return generate.outputs(VALUES, with_docs=False)


@pytest.fixture(scope="module")
def texts(plain: dict[str, str]) -> dict[str, str]:
    """Manifest name -> text."""
    return manifests.operator_manifests(plain, VALUES, OPTIONS)


@pytest.fixture(scope="module")
def written(texts: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Manifest name -> parsed manifest."""
    return {name: parsed(text) for name, text in texts.items()}


def parsed(text: str) -> dict[str, Any]:
    """YAML by the parser in C: the dashboards are long."""
    value: dict[str, Any] = yaml.load(text, Loader=yaml.CSafeLoader)
    return value


def kind(written: dict[str, dict[str, Any]], wanted: str) -> list[dict[str, Any]]:
    """Manifests of one kind."""
    return [item for item in written.values() if item["kind"] == wanted]


def problems(manifest: dict[str, Any]) -> list[str]:
    """What the API server or the operator would refuse."""
    found = [f"no {key}" for key in ("apiVersion", "kind", "metadata") if not manifest.get(key)]
    metadata = manifest.get("metadata", {})
    if not NAME.fullmatch(metadata.get("name", "")):
        found.append(f"name {metadata.get('name')!r}")
    found += [f"label {key}" for key, value in metadata.get("labels", {}).items() if not isinstance(value, str)]
    if manifest["kind"] == "ConfigMap":
        found += [f"data {key}" for key, value in manifest["data"].items() if not isinstance(value, str)]
        return found
    spec = manifest["spec"]
    found += [f"spec.{key}" for key in set(spec) - FIELDS[manifest["kind"]]]
    if manifest["kind"] == "PrometheusRule":
        for group in spec["groups"]:
            found += [f"group {key}" for key in set(group) - GROUP]
            found += [f"rule {key}" for rule in group["rules"] for key in set(rule) - RULE]
    if manifest["kind"] == "AlertmanagerConfig":
        found += route_problems(spec["route"]) + receiver_problems(spec)
    return found


def route_problems(route: dict[str, Any]) -> list[str]:
    """Unknown fields of routes, matchers that are no objects."""
    found = [f"route {key}" for key in set(route) - ROUTE]
    found += [f"matcher {item}" for item in route.get("matchers", []) if set(item) != {"name", "value", "matchType"}]
    return found + [item for child in route.get("routes", []) for item in route_problems(child)]


def receiver_problems(spec: dict[str, Any]) -> list[str]:
    """Unknown integrations or fields, receivers that a route names and that are not there."""
    names = {item["name"] for item in spec["receivers"]}
    wanted = {spec["route"]["receiver"], *(item["receiver"] for item in spec["route"]["routes"])}
    found = [f"receiver {name} is missing" for name in wanted - names]
    for receiver in spec["receivers"]:
        for key in set(receiver) - {"name"}:
            allowed = INTEGRATIONS.get(key, set())
            found += [f"{key}.{name}" for item in receiver[key] for name in set(item) - allowed]
    return found


def test_every_manifest_fits_its_kind(written: dict[str, dict[str, Any]]) -> None:
    """No unknown field, a valid name, the site's label and ours on each."""
    for name, manifest in written.items():
        assert problems(manifest) == [], name
        assert manifest["metadata"]["labels"]["release"] == "prom"
        assert manifest["metadata"]["labels"]["app.kubernetes.io/name"] == "nvrx-sre"
    assert {item["kind"] for item in written.values()} == {*FIELDS, "ConfigMap"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "route", "group_by"), ["run"]),
        (("spec", "route", "matchers"), ['severity="critical"']),
        (("spec", "route", "receiver"), "nobody"),
        (("spec", "receivers"), [{"name": "ticket", "slackConfigs": [{"api_url": "x"}]}]),
        (("spec", "templates"), ["x"]),
        (("metadata", "name"), "Not_Valid"),
        (("metadata", "labels"), {"a": 1}),
    ],
)
def test_the_check_refuses_what_the_operator_would(
    written: dict[str, dict[str, Any]], path: tuple[str, ...], value: object
) -> None:
    """Alertmanager's own spelling, a receiver that is not there, names and labels that are none."""
    manifest = json.loads(json.dumps(written["alertmanagerconfig.yaml"]))
    holder = manifest
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    assert problems(manifest) != []


def test_names_are_unique_by_kind(written: dict[str, dict[str, Any]]) -> None:
    """One would overwrite the other."""
    names = [(item["kind"], item["metadata"]["name"]) for item in written.values()]
    assert len(set(names)) == len(names)


def test_manifests_can_be_applied(written: dict[str, dict[str, Any]]) -> None:
    """Below the size of an object, and of the annotation that `kubectl apply` keeps."""
    for name, manifest in written.items():
        assert len(json.dumps(manifest).encode()) < APPLY_BYTES_MAX < OBJECT_BYTES_MAX, name


def test_promtool_accepts_the_embedded_rules(
    written: dict[str, dict[str, Any]], plain: dict[str, str], tmp_path: Path
) -> None:
    """Each PrometheusRule's spec is a rules file, the same as the plain one."""
    rules = kind(written, "PrometheusRule")
    assert len(rules) == len([path for path in plain if path.endswith(manifests.RULE_SUFFIX)])
    for manifest in rules:
        stem = manifest["metadata"]["name"]
        assert manifest["spec"] == parsed(plain[f"alerts/{stem}{manifests.RULE_SUFFIX}"])
        file = tmp_path / f"{stem}.yaml"
        file.write_text(yaml.safe_dump(manifest["spec"]))
        checked = promtool.check(file)
        assert checked.passed, checked.output


def back(value: Any) -> Any:
    """An AlertmanagerConfig's spec in Alertmanager's own spelling, secrets as the files they stand for."""
    if isinstance(value, list):
        return [back(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"name", "value", "matchType"}:
        return f'{value["name"]}{value["matchType"]}"{value["value"]}"'
    names = {
        "routingKey": "routing_key_file", "apiURL": "api_url_file", "clientURL": "client_url",
        "pagerDutyLinkConfigs": "links", "sourceMatch": "source_matchers", "targetMatch": "target_matchers",
    }  # fmt: skip
    found: dict[str, Any] = {}
    for key, item in value.items():
        name = names.get(key, re.sub(r"([A-Z])", lambda match: f"_{match[1].lower()}", key))
        if key in ("routingKey", "apiURL"):
            found[name] = f"/etc/alertmanager/secrets/{item['key']}"
        elif key == "details":
            found[name] = {pair["key"]: pair["value"] for pair in item}
        elif key == "pagerDutyLinkConfigs":
            found[name] = [{"href": link["href"], "text": link["alt"]} for link in item]
        else:
            found[name] = back(item)
    return found


def test_amtool_accepts_the_embedded_configuration(written: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Spelt back it is the shipped example, with a route that takes our alerts alone; amtool accepts it."""
    (manifest,) = kind(written, "AlertmanagerConfig")
    config = back(manifest["spec"])
    assert config["route"].pop("matchers") == ['alertname=~"Nvrx.+"']
    example = alertmanager_config(values=VALUES)
    assert {key: value for key, value in example.items() if key != "templates"} == config
    (templates,) = [item for item in kind(written, "ConfigMap") if item["metadata"]["name"].endswith("templates")]
    file = tmp_path / "nvrx-sre.tmpl"
    file.write_text(templates["data"]["nvrx-sre.tmpl"])
    (tmp_path / "alertmanager.yaml").write_text(yaml.safe_dump({**config, "templates": [str(file)]}))
    amtool = shutil.which("amtool")
    assert amtool is not None, "install prometheus-alertmanager"
    command = [amtool, "check-config", str(tmp_path / "alertmanager.yaml")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_pod_monitor_puts_the_cluster_on_every_series(written: dict[str, dict[str, Any]]) -> None:
    """External labels are not seen by rules; the namespace comes from the operator."""
    (monitor,) = kind(written, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "cluster", "replacement": "c1", "action": "replace"}]
    assert (endpoint["port"], endpoint["path"]) == ("metrics", "/metrics")


def test_dashboards_are_found_by_the_sidecar(written: dict[str, dict[str, Any]], plain: dict[str, str]) -> None:
    """One ConfigMap a dashboard with the sidecar's label; its JSON is the plain file."""
    maps = [item for item in kind(written, "ConfigMap") if "grafana_dashboard" in item["metadata"]["labels"]]
    data = {f"dashboards/{key}": value for item in maps for key, value in item["data"].items()}
    assert data == {path: text for path, text in plain.items() if path.startswith("dashboards/")}
    assert all(item["metadata"]["labels"]["grafana_dashboard"] == "1" for item in maps)


def test_provisioning_loads_the_dashboards_and_leads_from_exemplars_to_traces(plain: dict[str, str]) -> None:
    """Provider, data source whose exemplars link by `trace_id` (as exported), and the plain dashboards."""
    files = manifests.grafana_provisioning(plain)
    provider = yaml.safe_load(files["provisioning/dashboards/nvrx-sre.yaml"])["providers"][0]
    assert provider["options"]["path"] == manifests.DASHBOARD_DIRECTORY
    (source,) = yaml.safe_load(files["provisioning/datasources/nvrx-sre.yaml"])["datasources"]
    assert "isDefault" not in source, "two defaults, and Grafana does not start"
    assert source["jsonData"]["exemplarTraceIdDestinations"] == [{"name": "trace_id", "datasourceUid": "tempo"}]
    assert {path for path in files if path.startswith("dashboards/")} == {
        path for path in plain if path.startswith("dashboards/")
    }


def test_a_matcher_that_is_none_is_an_internal_error() -> None:
    """It could not be translated and would silently match everything."""
    with pytest.raises(InternalError, match="is not a matcher"):
        manifests.to_alertmanager_config({"route": {"matchers": ["severity"]}, "receivers": [], "inhibit_rules": []})


def test_the_command_line_writes_checks_and_overrides(tmp_path: Path) -> None:
    """Options reach the manifests and beat the values file; a file that is gone is drift."""
    values, out = tmp_path / "values.yaml", tmp_path / "out"
    values.write_text("runbook_base_url: https://file.example\nsample_memory_s: 700\n")
    arguments = [
        *("generate", "--format", "prometheus-operator", "--out", str(out), "--values", str(values)),
        *("--runbook-base-url", "https://line.example", "--group-labels", "team,run", "--cluster", "c9"),
    ]
    assert main(arguments) == 0
    rules = (out / "prometheusrule-nvrx-sre.yaml").read_text()
    assert "https://line.example/NvrxRunHalted.md" in rules
    assert "by (team, run)" in rules
    assert "[700s]" in rules
    assert "replacement: c9" in (out / "podmonitor.yaml").read_text()
    (out / "podmonitor.yaml").unlink()
    assert main([*arguments, "--check"]) == 70


def test_a_locked_endpoint_is_scraped_by_the_secrets_names(tmp_path: Path) -> None:
    """Scheme, certificate check by the name in it, and login, in the operator's words; open endpoints have none."""
    secrets = ["--scrape-ca-secret", "ca", "--scrape-server-name", "launcher.example", "--scrape-login-secret", "login"]
    for name, more in (("open", []), ("locked", secrets)):
        assert main(["generate", "--format", "prometheus-operator", "--out", str(tmp_path / name), *more]) == 0
    (opened,), (locked,) = (
        parsed((tmp_path / name / "podmonitor.yaml").read_text())["spec"]["podMetricsEndpoints"]
        for name in ("open", "locked")
    )
    assert locked == opened | {
        "scheme": "https",
        "tlsConfig": {"ca": {"secret": {"name": "ca", "key": "ca.crt"}}, "serverName": "launcher.example"},
        "basicAuth": {
            "username": {"name": "login", "key": "username"},
            "password": {"name": "login", "key": "password"},
        },
    }
    assert not {"scheme", "tlsConfig", "basicAuth"} & set(opened)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "prometheus-operator"], "give --out DIR"),
        (["--out", "out", "--cluster", "c1"], "belong to --format prometheus-operator"),
        (["--out", "out", "--scrape-login-secret", "s"], "give --scrape-ca-secret too"),
        (["--out", "out", "--scrape-ca-secret", "s"], "--scrape-server-name are given together"),
        (
            ["--out", "out", "--scrape-ca-secret", "s", "--scrape-server-name", "n"],
            "belong to --format prometheus-operator",
        ),
        (["--out", "out", "--format", "prometheus-operator", "--manifest-label", "release"], "is not NAME=VALUE"),
        (["--out", "out", "--group-labels", "team"], "must contain 'run'"),
        (["--out", "out", "--runbook-base-url", "wiki"], "http or https"),
    ],
)
def test_what_does_not_fit_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    """Exit 78, nothing written."""
    out = tmp_path / "out"
    given = [str(out) if item == "out" else item for item in arguments]
    assert main(["generate", *given]) == UserError.exit_code
    assert message in capsys.readouterr().err
    assert not out.exists()
