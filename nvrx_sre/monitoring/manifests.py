"""The generated files in the forms that clusters and Grafana take them in.

Model: every manifest wraps what `generate.outputs` writes, so there is one source of each rule, route and panel:
`PrometheusRule` of each rules file, `AlertmanagerConfig` of the Alertmanager example (secrets become references to a
Secret), a ConfigMap of its templates, a `PodMonitor` that gives each series its cluster, and one ConfigMap a dashboard
for Grafana's sidecar. Provisioning is a provider, a data source and the dashboards.

Pure; thread-safe. Must not: talk to a cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from nvrx_sre.core.errors import InternalError, UserError
from nvrx_sre.monitoring import assets
from nvrx_sre.monitoring.alertmanager import alertmanager_config
from nvrx_sre.monitoring.values import Values
from nvrx_sre.monitoring.yaml_files import YAML_HEADER, yaml_text

NAME = "nvrx-sre"
APP_LABELS = {"app.kubernetes.io/name": NAME}
"""On every manifest, and what the PodMonitor selects pods by."""
SECRET = "nvrx-sre-notifications"
"""Secret that the AlertmanagerConfig reads, with the keys that the example's secret files are named after."""
METRICS_PORT = "metrics"
"""Name of the launcher's container port."""
DASHBOARD_LABEL = {"grafana_dashboard": "1"}
"""What the sidecar of Grafana's chart watches for, by its default."""
DASHBOARD_FOLDER = {"grafana_folder": NAME}
DASHBOARD_DIRECTORY = f"/var/lib/grafana/dashboards/{NAME}"
RULE_SUFFIX = ".rules.yaml"
SCRAPE_INTERVAL = "15s"
_MATCHER = re.compile(r'(?P<name>\w+)(?P<type>=~|!~|!=|=)"(?P<value>.*)"')
_SECRET_FIELDS = {"routing_key_file": "routingKey", "api_url_file": "apiURL"}
_FIELDS = {"client_url": "clientURL", "links": "pagerDutyLinkConfigs"}


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """What a cluster's manifests need beside the values."""

    cluster: str = "default"
    """Value of the label `cluster` that the PodMonitor puts on every series."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels by which the site's operator selects, e.g. release=prometheus."""
    scrape_ca_secret: str = ""
    """Secret whose key `ca.crt` the launchers' certificates are checked against; '' where they serve without TLS."""
    scrape_server_name: str = ""
    """Name in those certificates; needed, because pods are scraped by their address."""
    scrape_login_secret: str = ""
    """Secret with the keys `username` and `password` of the launchers' --metrics-users."""

    def __post_init__(self) -> None:
        if bool(self.scrape_ca_secret) != bool(self.scrape_server_name):
            raise UserError(
                "--scrape-ca-secret and --scrape-server-name are given together: pods are scraped by their address"
            )
        if self.scrape_login_secret and not self.scrape_ca_secret:
            raise UserError("--scrape-login-secret would be sent in the clear: give --scrape-ca-secret too")


def operator_manifests(files: Mapping[str, str], values: Values, options: ManifestOptions) -> dict[str, str]:
    """File name -> manifest for the Prometheus operator and Grafana's sidecar, from the generated `files`."""
    labels = {**APP_LABELS, **options.labels}
    found = {
        "podmonitor.yaml": _pod_monitor(labels, options),
        "alertmanagerconfig.yaml": _alertmanager_manifest(labels, values),
        "alertmanager-templates.yaml": _config_map(
            f"{NAME}-alertmanager-templates", labels, {"nvrx-sre.tmpl": files[assets.TEMPLATES_FILE]}
        ),
    }
    for path, text in files.items():
        name = PurePosixPath(path).name
        if name.endswith(RULE_SUFFIX):
            stem = name.removesuffix(RULE_SUFFIX)
            found[f"prometheusrule-{stem}.yaml"] = _manifest(
                "monitoring.coreos.com/v1", "PrometheusRule", stem, labels, spec=yaml.safe_load(text)
            )
        elif path.startswith("dashboards/"):
            stem = name.removesuffix(".json")
            found[f"dashboard-{stem}.yaml"] = _config_map(
                f"{NAME}-dashboard-{stem}", {**labels, **DASHBOARD_LABEL}, {name: text}, DASHBOARD_FOLDER
            )
    return {name: _text(value) for name, value in found.items()}


def grafana_provisioning(files: Mapping[str, str]) -> dict[str, str]:
    """File name -> text for Grafana's provisioning folder, and the dashboards that it loads."""
    provider = {
        "name": NAME,
        "folder": NAME,
        "type": "file",
        "disableDeletion": True,
        "allowUiUpdates": False,
        "options": {"path": DASHBOARD_DIRECTORY, "foldersFromFilesStructure": False},
    }
    # no `isDefault`: with a second default Grafana does not start, and the one of a site is not ours to change
    source = {
        "name": "Prometheus",
        "uid": "prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": "http://prometheus:9090",
        "jsonData": {
            "httpMethod": "POST",
            "timeInterval": SCRAPE_INTERVAL,
            # An exemplar of a histogram carries the trace of its incident: a click leads to the spans.
            "exemplarTraceIdDestinations": [{"name": "trace_id", "datasourceUid": "tempo"}],
        },
    }
    return {
        f"provisioning/dashboards/{NAME}.yaml": _text({"apiVersion": 1, "providers": [provider]}),
        f"provisioning/datasources/{NAME}.yaml": _text({"apiVersion": 1, "datasources": [source]}),
        **{path: text for path, text in files.items() if path.startswith("dashboards/")},
    }


def to_alertmanager_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`spec` of an AlertmanagerConfig (v1alpha1) from Alertmanager's own configuration.

    Its route takes our alerts alone: the operator puts it beside those of other teams.
    """
    route = _operator_route(config["route"])
    return {
        "route": {**route, "matchers": [_matcher('alertname=~"Nvrx.+"')]},
        "receivers": [_operator_receiver(item) for item in config["receivers"]],
        "inhibitRules": [
            {
                "sourceMatch": [_matcher(item) for item in rule["source_matchers"]],
                "targetMatch": [_matcher(item) for item in rule["target_matchers"]],
                "equal": rule["equal"],
            }
            for rule in config["inhibit_rules"]
        ],
    }


def _operator_route(route: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in route.items():
        if key == "matchers":
            found[key] = [_matcher(item) for item in value]
        elif key == "routes":
            found[key] = [_operator_route(item) for item in value]
        else:
            found[_camel(key)] = value
    return found


def _operator_receiver(receiver: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _camel(key): value if key == "name" else [_operator_integration(item) for item in value]
        for key, value in receiver.items()
    }


def _operator_integration(integration: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in integration.items():
        if key in _SECRET_FIELDS:
            found[_SECRET_FIELDS[key]] = {"name": SECRET, "key": PurePosixPath(value).name}
        elif key == "details":
            found[key] = [{"key": name, "value": item} for name, item in value.items()]
        elif key == "links":
            found[_FIELDS[key]] = [{"href": item["href"], "alt": item["text"]} for item in value]
        else:
            found[_FIELDS.get(key, _camel(key))] = value
    return found


def _matcher(text: str) -> dict[str, str]:
    match = _MATCHER.fullmatch(text)
    if match is None:
        raise InternalError(f"{text!r} is not a matcher")
    return {"name": match["name"], "matchType": match["type"], "value": match["value"]}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(item.capitalize() for item in rest)


def _pod_monitor(labels: Mapping[str, str], options: ManifestOptions) -> dict[str, Any]:
    endpoint = {
        "port": METRICS_PORT,
        "path": "/metrics",
        **_pod_access(options),
        "interval": SCRAPE_INTERVAL,
        # External labels are not seen by rules, and the key needs the cluster on the series itself.
        "relabelings": [{"targetLabel": "cluster", "replacement": options.cluster, "action": "replace"}],
    }
    spec = {"selector": {"matchLabels": APP_LABELS}, "podMetricsEndpoints": [endpoint]}
    return _manifest("monitoring.coreos.com/v1", "PodMonitor", NAME, labels, spec=spec)


def _pod_access(options: ManifestOptions) -> dict[str, Any]:
    """How the operator's Prometheus gets at the endpoints: names of secrets, never what is in them."""
    found: dict[str, Any] = {}
    if options.scrape_ca_secret:
        ca = {"secret": {"name": options.scrape_ca_secret, "key": "ca.crt"}}
        found |= {"scheme": "https", "tlsConfig": {"ca": ca, "serverName": options.scrape_server_name}}
    if options.scrape_login_secret:
        login = {key: {"name": options.scrape_login_secret, "key": key} for key in ("username", "password")}
        found["basicAuth"] = login
    return found


def _alertmanager_manifest(labels: Mapping[str, str], values: Values) -> dict[str, Any]:
    spec = to_alertmanager_config(alertmanager_config(values=values))
    return _manifest("monitoring.coreos.com/v1alpha1", "AlertmanagerConfig", NAME, labels, spec=spec)


def _config_map(
    name: str, labels: Mapping[str, str], data: Mapping[str, str], annotations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    manifest = _manifest("v1", "ConfigMap", name, labels, data=dict(data))
    if annotations:
        manifest["metadata"]["annotations"] = dict(annotations)
    return manifest


def _manifest(api: str, kind: str, name: str, labels: Mapping[str, str], **content: Any) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": dict(labels)}, **content}


def _text(value: object) -> str:
    return YAML_HEADER + yaml_text(value)
