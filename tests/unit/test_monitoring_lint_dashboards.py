"""The dashboards' lint finds planted mistakes; Grafana's own types lose nothing of what is generated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from nvrx_sre.monitoring import assets, dashboard_lint, lint
from nvrx_sre.monitoring.alerts import alert_rules, recording_rules
from nvrx_sre.monitoring.dashboards import boards, dashboard_files
from nvrx_sre.monitoring.values import Values

VALUES = Values()
KNOWN = lint.known_series(recording_rules(VALUES), VALUES.group_labels)
FILES = dashboard_files(VALUES)
NOT_MODELLED = {
    "definition": "what the variable's editor shows; the SDK knows `query` alone",
    "titleFormat": "of an annotation on Prometheus: a field of the data source",
    "useValueForTime": "of an annotation on Prometheus: a field of the data source",
}
"""Keys that Grafana reads and the SDK's types lack."""


def run_board() -> dict[str, Any]:
    """A copy of the Run dashboard to break."""
    document: dict[str, Any] = json.loads(FILES["dashboards/run.json"])
    return document


def lost(before: Any, after: Any, where: str = "") -> list[str]:
    """Paths of what `before` holds and `after` does not."""
    if isinstance(before, dict):
        keys = [key for key in before if key not in NOT_MODELLED]
        present = after if isinstance(after, dict) else {}
        gone = [f"{where}.{key}" for key in keys if key not in present]
        return gone + [
            path for key in keys if key in present for path in lost(before[key], after[key], f"{where}.{key}")
        ]
    if isinstance(before, list):
        if not isinstance(after, list) or len(after) != len(before):
            return [where]
        pairs = zip(before, after, strict=True)
        return [path for index, (one, other) in enumerate(pairs) for path in lost(one, other, f"{where}[{index}]")]
    return [] if before == after else [f"{where}: {before!r} became {after!r}"]


def through_the_sdk(document: dict[str, Any]) -> dict[str, Any]:
    """The document as Grafana's own types write it."""
    register_default_plugins()
    encoded: dict[str, Any] = json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))
    return encoded


@pytest.mark.parametrize("file", FILES)
def test_grafana_s_types_lose_nothing(file: str) -> None:
    """Every key and value of every dashboard survives decoding and encoding by grafana-foundation-sdk."""
    document = json.loads(FILES[file])
    assert lost(document, through_the_sdk(document)) == []


@pytest.mark.parametrize(
    "plant",
    [
        lambda document: document["panels"][1]["options"].update(colourMode="value"),
        lambda document: document["panels"][1]["fieldConfig"]["defaults"].update(units="s"),
        lambda document: document["panels"][1]["targets"][0].update(query="up"),
        lambda document: document["templating"]["list"][1].update(includeAny=True),
        lambda document: document.update(refreshes="10s"),
    ],
)
def test_a_misspelt_key_does_not_survive(plant: Any) -> None:
    """The round trip is a check: what Grafana does not know is lost in it."""
    document = run_board()
    plant(document)
    assert lost(document, through_the_sdk(document)) != []


@pytest.mark.parametrize("file", FILES)
def test_every_dashboard_passes_the_lint(file: str) -> None:
    """Metrics, labels and functions fit the catalog; title, description, unit, data source on every panel."""
    assert dashboard_lint.dashboard_problems(FILES[file], KNOWN) == []


RUN = '{cluster=~"$cluster",namespace=~"$namespace",run="$run"}'


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda panel: panel.pop("description"), "no description"),
        (lambda panel: panel.update(title=""), "no title"),
        (lambda panel: panel.update(title="Ledger"), "two panels are called 'Ledger'"),
        (lambda panel: panel["fieldConfig"]["defaults"].pop("unit"), "no unit"),
        (lambda panel: panel.update(targets=[]), "no query"),
        (lambda panel: panel.update(datasource="Prometheus"), "data source"),
        (lambda panel: panel["targets"][0].update(datasource=None), "data source"),
        (lambda panel: panel["targets"][0].update(legendFormat=""), "without a legend"),
        (lambda panel: panel["targets"][0].update(expr="nvrx_nothing"), "not in the catalog"),
        (lambda panel: panel["targets"][0].update(expr='nvrx_loss{run="$run"}'), "not selected by cluster"),
        (lambda panel: panel["targets"][0].update(expr=f"nvrx_tokens_total{RUN}"), "read without a rate"),
        (lambda panel: panel["targets"][0].update(expr=f"rate(nvrx_tokens_total{RUN}[5m])"), "$__rate_interval"),
        (lambda panel: panel.update(id=1), "ids repeat"),
        (lambda panel: panel["gridPos"].update(w=5), "covers"),
        (lambda panel: panel["gridPos"].update(x=23, w=5), "wider"),
    ],
)
def test_c73_a_panel_that_lacks_something_is_found(change: Any, word: str) -> None:
    """Each omission of one panel is a finding; the data source must be the variable."""
    document = run_board()
    change(next(item for item in document["panels"] if item["title"] == "State"))
    assert any(word in item for item in dashboard_lint.dashboard_problems(json.dumps(document), KNOWN))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda document: document.update(schemaVersion=38), "schemaVersion"),
        (lambda document: document.update(uid=""), "uid"),
        (lambda document: document.update(editable=True), "editable"),
        (lambda document: document["templating"]["list"].pop(0), "data source variables"),
        (lambda document: document["templating"]["list"][1].update(refresh=1), "not read again"),
        (lambda document: document["links"][0].update(keepTime=False), "loses the time range"),
        (lambda document: document["annotations"]["list"][0].update(expr="nvrx_nothing"), "not in the catalog"),
    ],
)
def test_c73_a_dashboard_that_lacks_something_is_found(change: Any, word: str) -> None:
    """Schema, stable uid, variables, links, annotations."""
    document = run_board()
    change(document)
    assert any(word in item for item in dashboard_lint.dashboard_problems(json.dumps(document), KNOWN))


def test_every_counter_that_is_read_raw_is_read_somewhere() -> None:
    """The list of exceptions holds nothing that no dashboard needs."""
    text = "".join(FILES.values())
    assert [name for name in dashboard_lint.RAW_COUNTERS if name not in text] == []


def test_boards_lead_to_each_other_and_nowhere_else() -> None:
    """Each board links to all the others by uid and slug, to the runbooks' base, and to no other place."""
    urls = {board.url for board in boards()}
    assert len(urls) == 6
    for board in boards():
        links = [link["url"] for link in json.loads(FILES[board.file])["links"]]
        assert set(links) == urls - {board.url} | {VALUES.runbook_base_url}
        assert board.url.split("/")[2] == json.loads(FILES[board.file])["uid"]


def test_panels_lead_to_runbooks_that_exist() -> None:
    """Each link of a panel is the page of an alert; the four situations and the halt have theirs."""
    base = f"{VALUES.runbook_base_url}/"
    documents = [json.loads(text) for text in FILES.values()]
    urls = [link["url"] for document in documents for panel in document["panels"] for link in panel.get("links", ())]
    assert all(url.startswith(base) and url.endswith(".md") for url in urls)
    linked = {url.removeprefix(base).removesuffix(".md") for url in urls}
    assert linked <= set(assets.runbook_names())
    assert {"NvrxCrashLooping", "NvrxRunHalted", "NvrxRunStalled", "NvrxRendezvousStuck", "NvrxFlapping"} <= linked


def test_alerts_lead_to_the_run_dashboard() -> None:
    """The address in an alert is the one that the generated dashboard has."""
    run = next(board for board in boards() if board.slug == "run")
    for rule in alert_rules(VALUES):
        assert f"{run.url}?" in rule.to_rule(VALUES)["annotations"]["dashboard_url"]
