"""Multipliers and windows of the rules: one frozen set of values, each with the source of its number.

Model: time limits and budgets come from series that the run exports; what stands here only multiplies them or
says for how long a sample is remembered. A YAML file may override single values (`load_values`); unknown keys
are errors. `values_file()` renders the defaults with their sources as that file.

Thread safety: immutable.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nvrx_sre.core.errors import UserError

COMMENT_WIDTH = 110
_LABEL_NAME = re.compile(r"[a-z][a-z0-9_]*")


def _value(default: Any, source: str) -> Any:
    return field(default=default, metadata={"source": source})


@dataclass(frozen=True, kw_only=True)
class Values:
    """What a site may tune. Seconds, ratios and addresses."""

    group_labels: tuple[str, ...] = _value(
        ("cluster", "namespace", "run"),
        "What one alert is about. `run` comes from the series, the others from the scrape's labels.",
    )
    crash_loop_budget_ratio: float = _value(
        1.0,
        "Share of a retry budget that attempts without progress must have used before a page. At 1 the page comes "
        "with the attempt that the policy counts as the last (core.limits.CapLimits: 3 in a row, 5 in 30 min).",
    )
    crash_loop_for_s: float = _value(
        0.0,
        "A crash loop of a deterministic fault is over in less than a scrape: any wait would miss it.",
    )
    sample_memory_s: float = _value(
        600.0,
        "How long the last sample of a run stands in for a missing one: longer than a pod's replacement "
        "(five minutes until the old series is stale, plus image pull and start).",
    )
    halted_memory_s: float = _value(
        604_800.0,
        "How long a halted run whose endpoint is gone keeps its alert: one week, a long weekend included; "
        "below Prometheus' default retention of 15 days.",
    )
    runbook_base_url: str = _value(
        "https://nvrx-sre.example/runbooks",
        "Where the site serves runbooks/ (`nvrx-sre runbook NAME` prints the same pages).",
    )
    dashboard_base_url: str = _value(
        "https://grafana.example",
        "The site's Grafana.",
    )

    def __post_init__(self) -> None:
        _check_labels(self.group_labels)
        if not 0 < self.crash_loop_budget_ratio <= 1:
            raise UserError(f"crash_loop_budget_ratio is {self.crash_loop_budget_ratio}: use more than 0, at most 1")
        if self.crash_loop_for_s < 0:
            raise UserError(f"crash_loop_for_s is {self.crash_loop_for_s}: use 0 or more")
        if self.sample_memory_s < 1:
            raise UserError(f"sample_memory_s is {self.sample_memory_s}: use at least 1")
        if self.halted_memory_s <= self.sample_memory_s:
            raise UserError(
                f"halted_memory_s ({self.halted_memory_s}) must be above sample_memory_s ({self.sample_memory_s})"
            )
        for name in ("runbook_base_url", "dashboard_base_url"):
            if not getattr(self, name).startswith(("http://", "https://")):
                raise UserError(f"{name} is {getattr(self, name)!r}: use an http or https address")


def _check_labels(labels: tuple[str, ...]) -> None:
    if "run" not in labels:
        raise UserError("group_labels must contain 'run': without it one run's alert would hide another's")
    for label in labels:
        if not _LABEL_NAME.fullmatch(label):
            raise UserError(f"group_labels has {label!r}, which is not a label name")


def load_values(path: Path) -> Values:
    """Defaults with the overrides of a YAML file. Raises `UserError` for what does not fit."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read values {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"values {path} cannot be parsed: {error}") from error
    if document is None:
        return Values()
    if not isinstance(document, Mapping):
        raise UserError(f"values {path} must be a mapping of names to values")
    known = {item.name: item for item in dataclasses.fields(Values)}
    changes: dict[str, Any] = {}
    for key, value in document.items():
        if key not in known:
            raise UserError(f"{path}: unknown value {key!r}; known are {', '.join(known)}")
        changes[key] = _convert(f"{path}: {key}", known[key].default, value)
    return Values(**changes)


def _convert(what: str, default: Any, value: Any) -> Any:
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{what} must be a list of label names")
        return tuple(value)
    if isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{what} must be a number")
        return float(value)
    if not isinstance(value, str):
        raise UserError(f"{what} must be text")
    return value


def values_file() -> str:
    """The defaults as a commented YAML file."""
    blocks = []
    for item in dataclasses.fields(Values):
        default = list(item.default) if isinstance(item.default, tuple) else item.default
        source = textwrap.fill(
            item.metadata["source"], width=COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# "
        )
        blocks.append(f"{source}\n{item.name}: {json.dumps(default)}\n")
    return "\n".join(blocks)
