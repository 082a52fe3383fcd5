"""A small client of Prometheus' HTTP API: queries and the state of alerts.

Model: GET with a timeout against a loopback or given base URL; proxies of the environment are not used.
Blocking: each call waits at most its timeout. Raises `QueryError` when the server does not answer or refuses
the query. Thread safety: no state. Must not: write to the server.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from nvrx_sre.core.errors import NvrxError, UserError

TIMEOUT_S = 5.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class QueryError(NvrxError):
    """The server did not answer, or refused the query."""

    code = "monitoring_query"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One series of an instant vector."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True, kw_only=True)
class Course:
    """One series of a range query: (seconds since the Unix epoch, value) in the order of time."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]


def http_get(url: str, *, timeout_s: float = TIMEOUT_S) -> bytes:
    """Body of a GET. Raises `UserError` for a URL that is not http(s), `QueryError` if there is no 2xx answer."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"{url!r} is not an http or https address")
    try:
        with _OPENER.open(url, timeout=timeout_s) as response:
            body: bytes = response.read()
            return body
    except urllib.error.HTTPError as error:
        with error:
            detail = error.read(500).decode(errors="replace")
        raise QueryError(f"GET {url}: {error.code} {detail}") from error
    except (OSError, ValueError) as error:
        raise QueryError(f"GET {url}: {error}") from error


def instant(base_url: str, expression: str, *, at_s: float | None = None) -> list[Sample]:
    """Evaluate `expression` now, or at a moment. A scalar comes back as one sample without labels."""
    moment = {} if at_s is None else {"time": f"{at_s:.3f}"}
    data = _api(base_url, "query", {"query": expression, **moment})
    if data["resultType"] == "scalar":
        return [Sample(labels={}, value=float(data["result"][1]))]
    return [Sample(labels=item["metric"], value=float(item["value"][1])) for item in data["result"]]


def over_range(base_url: str, expression: str, start_s: float, end_s: float, step_s: float) -> list[Course]:
    """Evaluate `expression` every `step_s` seconds from `start_s` to `end_s`."""
    window = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:.3f}"}
    data = _api(base_url, "query_range", {"query": expression, **window})
    return [
        Course(labels=item["metric"], points=tuple((float(at), float(value)) for at, value in item["values"]))
        for item in data["result"]
    ]


def alerts(base_url: str) -> list[dict[str, Any]]:
    """Alerts that are pending or firing now: labels, annotations, state, activeAt, value."""
    found: list[dict[str, Any]] = _api(base_url, "alerts", {})["alerts"]
    return found


def rule_problems(base_url: str) -> list[str]:
    """Rules whose last evaluation failed, as `name: error`."""
    groups = _api(base_url, "rules", {})["groups"]
    return [
        f"{rule['name']}: {rule.get('lastError', '')}"
        for group in groups
        for rule in group["rules"]
        if rule["health"] == "err"
    ]


def alert_rule_names(base_url: str) -> list[str]:
    """Names of the alerting rules that the server has loaded, in order."""
    groups = _api(base_url, "rules", {"type": "alert"})["groups"]
    return [rule["name"] for group in groups for rule in group["rules"]]


def _api(base_url: str, path: str, parameters: dict[str, str]) -> Any:
    query = urllib.parse.urlencode(parameters)
    answer = json.loads(http_get(f"{base_url.rstrip('/')}/api/v1/{path}?{query}"))
    if answer.get("status") != "success":
        raise QueryError(f"{path}: {answer.get('error', 'no error text')}")
    return answer["data"]
