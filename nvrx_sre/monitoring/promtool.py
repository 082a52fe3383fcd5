"""Runs promtool on rules: unit tests of alerts from series given as functions of time.

Model: a `Case` holds series (a value, or None where there is no sample, for each scrape) and expectations: which
runs have the alert firing at which moment. `run` writes rules and cases to a temporary directory and calls the
real promtool. Times are seconds from the case's beginning, which is the Unix epoch to promtool.

Blocking: a process of at most `TIMEOUT_S`. Thread safety: no state.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvrx_sre.core.errors import UserError
from nvrx_sre.monitoring.promql import duration

TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Series:
    """One input series: labels (with `__name__`) and its value at a time in seconds."""

    labels: Mapping[str, str]
    value: Callable[[float], float | None] | float
    """At a time; a number where it never changes and is always there."""

    def selector(self) -> str:
        inner = ",".join(f'{key}="{item}"' for key, item in self.labels.items() if key != "__name__")
        return f"{self.labels['__name__']}{{{inner}}}"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """At `at_s` exactly these label sets have the alert firing."""

    at_s: float
    alert: str
    firing: tuple[Mapping[str, str], ...]
    unsettled: tuple[str, ...] = ()
    """Runs that are not looked at here: their alert may or may not fire yet."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A story told in series, and what the alerts say about it."""

    name: str
    series: tuple[Series, ...]
    expectations: tuple[Expectation, ...]
    until_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What promtool said."""

    passed: bool
    output: str


def find_promtool() -> str:
    """promtool on the PATH. Raises `UserError` if there is none."""
    found = shutil.which("promtool")
    if found is None:
        raise UserError("promtool is not on the PATH: install prometheus")
    return found


def samples(value: Callable[[float], float | None] | float, until_s: float, interval_s: float) -> str:
    """promtool's notation of `value` at each scrape; the first gap after a sample is a stale marker."""
    if isinstance(value, float | int):
        return f"{float(value)!r}x{int(until_s // interval_s)}"
    written: list[str] = []
    present = False
    for index in range(int(until_s // interval_s) + 1):
        current = value(index * interval_s)
        if current is None:
            written.append("stale" if present else "_")
        else:
            written.append(repr(float(current)))
        present = current is not None
    return " ".join(written)


def to_group(case: Case, interval_s: float, key: Sequence[str]) -> dict[str, Any]:
    """The case as a group of promtool's test file."""
    by = ", ".join(key)
    return {
        "interval": duration(interval_s),
        "input_series": [
            {"series": item.selector(), "values": samples(item.value, case.until_s, interval_s)} for item in case.series
        ],
        "promql_expr_test": [
            {
                "expr": f"max by ({by}) (ALERTS{{{_matchers(item)}}})",
                "eval_time": duration(item.at_s),
                "exp_samples": [{"labels": _labels(labels), "value": 1} for labels in item.firing],
            }
            for item in case.expectations
        ],
    }


def _matchers(item: Expectation) -> str:
    unsettled = f',run!~"{"|".join(item.unsettled)}"' if item.unsettled else ""
    return f'alertname="{item.alert}",alertstate="firing"{unsettled}'


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'{key}="{item}"' for key, item in labels.items()) + "}"


def run(rules: str, cases: Sequence[Case], interval_s: float, key: Sequence[str]) -> Outcome:
    """Run `cases` against the text of a rules file, scraped and evaluated every `interval_s` seconds."""
    return _test(rules, [to_group(case, interval_s, key) for case in cases], interval_s)


def _test(rules: str, groups: Sequence[dict[str, Any]], interval_s: float) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="nvrx-sre-promtool-") as name:
        directory = Path(name)
        (directory / "rules.yaml").write_text(rules, encoding="utf-8")
        document = {"rule_files": ["rules.yaml"], "evaluation_interval": duration(interval_s), "tests": groups}
        # JSON is YAML, and written in a hundredth of the time
        (directory / "tests.yaml").write_text(json.dumps(document), encoding="utf-8")
        return _call(["test", "rules", "tests.yaml"], directory)


def alert_text(rules: str, case: Case, interval_s: float, *asked: tuple[str, float]) -> str:
    """Labels and annotations of alerts at moments as promtool prints them: what was got where nothing was expected."""
    group = to_group(case, interval_s, ())
    tests = [{"eval_time": duration(at_s), "alertname": alert} for alert, at_s in asked]
    group |= {"promql_expr_test": [], "alert_rule_test": tests}
    return _test(rules, [group], interval_s).output


def check(rules: Path) -> Outcome:
    """`promtool check rules` with every lint fatal."""
    return _call(["check", "rules", "--lint=all", "--lint-fatal", str(rules)], rules.parent)


def _call(arguments: Sequence[str], directory: Path) -> Outcome:
    done = subprocess.run(
        [find_promtool(), *arguments], cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    return Outcome(passed=done.returncode == 0, output=done.stdout + done.stderr)
