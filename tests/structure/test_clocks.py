"""What a run exports is stamped by its own clock, so no rule and no panel compares it with that of Prometheus.

`time() - <stamp of a run>` is the age of a stamp, plus that of the scrape, plus what two clocks differ by: a gap
between scrapes, or a host that is minutes off, would page for a run that is well. `CLOCK` (rules) and `Query.age`
(panels) stand in its place; where `time()` is right after all is listed here, with the reason.
"""

from __future__ import annotations

import ast
import json
import re

import pytest

from nvrx_sre.monitoring import generate
from nvrx_sre.monitoring.alerts import rules_document
from nvrx_sre.monitoring.alerts_kubernetes import kubernetes_alerts
from nvrx_sre.monitoring.rule import AHEAD
from nvrx_sre.monitoring.values import Values
from tests.structure.source import PACKAGE

VALUES = Values()
NOW = "time()"
RIGHT = {
    r"time\(\) - last_over_time\(run:nvrx_launcher_loop_timestamp_seconds:scraped\[\w+\]\)": (
        "both are Prometheus' own times: since when it was not answered"
    ),
    rf"time\(\) \+ on \([\w, ]+\) last_over_time\({AHEAD}\[\w+\]\)": (
        "what the two clocks differ by is added: a page says how long ago it was now, not at the newest scrape"
    ),
}
"""Pattern of a rule -> why it may ask for Prometheus' time."""
SHOWN = {
    "State": "how long it has been so",
    "New steps now?": "how long there was none",
    "Open incident": "how long it has been open",
    "Last good checkpoint": "how old it is",
    "Idle GPUs": "since when they have been idle",
    "Runs, worst first": "how long there was no step, how old the checkpoint is",
}
"""Panel -> what it goes on to show of a run that is not scraped; as long as it is, its own clock is asked."""
SPELLED = {"promql.py": "shown_age", "recordings.py": "silence", "rule.py": "_facts"}
"""Module -> its one function that writes `time()`."""


def rule_texts() -> dict[str, str]:
    """Each rule with its expression and annotations."""
    rules = [
        *rules_document(VALUES)["groups"][0]["rules"],
        *(item.to_rule(VALUES) for item in kubernetes_alerts(VALUES)),
    ]
    return {
        f"{index} {rule.get('alert') or rule['record']}": json.dumps([rule["expr"], rule.get("annotations", {})])
        for index, rule in enumerate(rules)
    }


def compared_with_now(text: str) -> bool:
    """Whether it asks for Prometheus' time in a way that is not listed."""
    for pattern in RIGHT:
        text = re.sub(pattern, "", text)
    return NOW in text


def panel_queries() -> list[tuple[str, str]]:
    """(title, query) of every panel and annotation."""
    found = []
    for name, text in generate.outputs(VALUES, with_docs=False).items():
        if name.startswith("dashboards/"):
            board = json.loads(text)
            panels = [*board["panels"], *(each for item in board["panels"] for each in item.get("panels", ()))]
            found += [(panel.get("title", ""), item["expr"]) for panel in panels for item in panel.get("targets", ())]
            found += [(item["name"], item.get("expr", "")) for item in board["annotations"]["list"]]
    return found


def test_no_rule_compares_a_stamp_of_a_run_with_now() -> None:
    """Each asks for the run's own clock; the listed ones do exist."""
    texts = rule_texts()
    assert [name for name, text in texts.items() if compared_with_now(text)] == []
    assert all(any(re.search(pattern, text) for text in texts.values()) for pattern in RIGHT)


def test_a_rule_that_compares_a_stamp_with_now_is_found() -> None:
    """The judge can fail."""
    assert compared_with_now("time() - run:nvrx_last_step_timestamp_seconds:max > 60")


def test_a_panel_asks_for_now_only_where_nothing_is_scraped() -> None:
    """Behind the age by the run's own clock, and on the listed panels alone."""
    asking = {title: query for title, query in panel_queries() if NOW in query}
    assert sorted(asking) == sorted(SHOWN)
    for query in asking.values():
        assert query.count(NOW) == len(re.findall(r"\) or time\(\) - ", query))


@pytest.mark.parametrize("path", sorted((PACKAGE / "monitoring").glob("*.py")), ids=lambda path: path.name)
def test_now_is_written_in_one_place_for_each_use(path: object) -> None:
    """A new rule or panel takes it from there, and with it what it must be compared with."""
    assert hasattr(path, "read_text")
    tree = ast.parse(path.read_text())
    spelling = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part is not docstring(node) and NOW in str(part.value)
    }
    assert spelling <= {SPELLED.get(path.name, "")}  # type: ignore[attr-defined]  # a path


def docstring(node: ast.FunctionDef) -> ast.expr | None:
    """The constant that is its docstring."""
    first = node.body[0]
    return first.value if isinstance(first, ast.Expr) else None
