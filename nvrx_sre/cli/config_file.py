"""`--config FILE`: a TOML or YAML file that stands between the explicit arguments and the defaults.

Model: sections of keys; each key is one option of the command, or one field of a limits dataclass. The options'
values become click's default map, so a file's value passes the same conversion and checks as an argument would.
An unknown section or key is an error with the nearest name. Explicit arguments beat the file, the file beats the
defaults.

Must not: read the environment, or accept a key that the command would ignore.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nvrx_sre.core.errors import UserError
from nvrx_sre.core.limits import CapLimits, Deadlines, DeadlineTuning, Limits, NodeLimits, TelemetryLimits

OPTION_KEYS: dict[str, dict[str, str]] = {
    "run": {
        "dir": "run_dir",
        "name": "name",
        "nproc": "nproc",
        "standbys": "standbys",
        "min_world_size": "min_world_size",
        "world_multiple": "world_multiple",
        "deadlines": "deadlines",
        "start_fresh": "start_fresh",
        "summary": "summary",
        "step_deadline": "step_deadline",
        "allow_brake": "allow_brake",
        "labels": "labels",
    },
    "train": {
        "steps": "steps",
        "data": "data",
        "model": "model",
        "seed": "seed",
        "grad_accum": "grad_accum",
        "batch_size": "batch_size",
        "seq_len": "seq_len",
        "learning_rate": "learning_rate",
        "evaluate_every": "evaluate_every",
    },
    "checkpoint": {
        "save_every": "save_every",
        "hot_every": "hot_every",
        "hot_slots": "hot_slots",
        "keep": "keep",
        "on_busy": "on_busy",
        "write_bandwidth": "write_bandwidth",
    },
    "faults": {"specs": "fault", "plan": "fault_plan"},
    "metrics": {
        "host": "metrics_host",
        "port": "metrics_port",
        "linger": "metrics_linger",
        "otlp": "otlp_endpoint",
        "tls_cert": "metrics_tls_cert",
        "tls_key": "metrics_tls_key",
        "users": "metrics_users",
        "ranks": "rank_metrics",
    },
}
"""Section -> key -> parameter of the command."""

EVERY_OPTION = "`nvrx-sre train`"
"""The command that has all of them; of another one, keys that it has not are not unknown but not for it."""

AnyLimits = CapLimits | Deadlines | DeadlineTuning | NodeLimits | TelemetryLimits

LIMIT_SECTIONS: dict[str, type[AnyLimits]] = {
    "caps": CapLimits,
    "deadlines": Deadlines,
    "tuning": DeadlineTuning,
    "nodes": NodeLimits,
    "telemetry": TelemetryLimits,
}
"""Section -> limits dataclass whose fields are its keys."""


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """What a file said: values of options (still as text) and fields of limits."""

    options: dict[str, str | list[str]] = field(default_factory=dict)
    limits: dict[str, dict[str, Any]] = field(default_factory=dict)


def load(path: Path, parameters: Collection[str]) -> ConfigFile:
    """Read `path` for a command that has `parameters`. Raises `UserError` for anything that does not fit."""
    document = _parse(path)
    options: dict[str, str | list[str]] = {}
    limits: dict[str, dict[str, Any]] = {}
    for section, content in document.items():
        if section not in OPTION_KEYS and section not in LIMIT_SECTIONS:
            raise UserError(f"{path}: unknown section [{section}]{_nearest(section, [*OPTION_KEYS, *LIMIT_SECTIONS])}")
        if not isinstance(content, Mapping):
            raise UserError(f"{path}: [{section}] must be a section of keys, not {content!r}")
        if section in LIMIT_SECTIONS:
            limits[section] = _limit_fields(path, section, content)
        else:
            options.update(_option_values(path, section, content, parameters))
    return ConfigFile(options=options, limits=limits)


def build_limits(fields_of: Mapping[str, Mapping[str, Any]], step_deadline_s: float | None = None) -> Limits:
    """Limits with the file's fields; an explicit step deadline beats the file. Raises `UserError`."""
    deadlines = dict(fields_of.get("deadlines", {}))
    if step_deadline_s is not None:
        deadlines["step_s"] = step_deadline_s
    return Limits(
        caps=CapLimits(**fields_of.get("caps", {})),
        deadlines=Deadlines(**deadlines),
        tuning=DeadlineTuning(**fields_of.get("tuning", {})),
        nodes=NodeLimits(**fields_of.get("nodes", {})),
        telemetry=TelemetryLimits(**fields_of.get("telemetry", {})),
    )


def _parse(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"config {path} is not a text file") from error
    try:
        document = yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise UserError(f"config {path} cannot be parsed: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, Mapping) or not all(isinstance(key, str) for key in document):
        raise UserError(f"config {path} must be sections of keys")
    return document


def _option_values(
    path: Path, section: str, content: Mapping[str, Any], parameters: Collection[str]
) -> dict[str, str | list[str]]:
    keys = {key: name for key, name in OPTION_KEYS[section].items() if name in parameters}
    if not keys:
        raise UserError(f"{path}: [{section}] is for {EVERY_OPTION}")
    values: dict[str, str | list[str]] = {}
    for key, value in content.items():
        name = keys.get(key)
        if name is None and key in OPTION_KEYS[section]:
            raise UserError(f"{path}: {key!r} in [{section}] is for {EVERY_OPTION}")
        if name is None:
            raise UserError(f"{path}: unknown key {key!r} in [{section}]{_nearest(key, keys)}")
        values[name] = _as_text(path, section, key, value)
    return values


def _as_text(path: Path, section: str, key: str, value: Any) -> str | list[str]:
    """The value as it would stand on a command line: the option's own type then converts it."""
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return list(value)
    raise UserError(f"{path}: {key!r} in [{section}] must be text, a number, true or false, or a list of texts")


def _limit_fields(path: Path, section: str, content: Mapping[str, Any]) -> dict[str, Any]:
    known = {item.name: item for item in dataclasses.fields(LIMIT_SECTIONS[section])}
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            raise UserError(f"{path}: unknown key {key!r} in [{section}]{_nearest(key, known)}")
        values[key] = _limit_value(f"{path}: {key!r} in [{section}]", known[key].default, value)
    return values


def _limit_value(what: str, default: Any, value: Any) -> Any:
    """`value` in the type of the field's default, at least 0."""
    if isinstance(default, tuple):
        if not isinstance(value, list) or not value or not all(_is_number(item) for item in value):
            raise UserError(f"{what} must be a list of seconds, 0 or more")
        return tuple(float(item) for item in value)
    if isinstance(default, int):
        if not isinstance(value, int) or not _is_number(value):
            raise UserError(f"{what} must be a whole number, 0 or more")
        return value
    if not _is_number(value):
        raise UserError(f"{what} must be a number, 0 or more")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _nearest(name: str, known: Collection[str]) -> str:
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else f"; known are {', '.join(sorted(known))}"
