"""Wrong rules, made from the right ones: every comparison, gate, wait and label of every rule is broken once.

`alert_mutants` returns rules under new names, so that many of them stand in one rules file beside the right ones and
one promtool call judges them all: a mutant is dead when its alert fires at another moment, or for another run, than
the stories say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Rule = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A wrong rule under a name of its own."""

    what: str
    rule: Rule
    told: str
    """Name of the alert in the stories."""

    @property
    def name(self) -> str:
        """Name in the rules."""
        return str(self.rule["alert"])


SEVERAL = re.compile(r"\b(max|sum) by \([^)]*\) \((?=run:[\w:]+(?:{\w+=~|\)))")
"""Aggregations over several series of a run; one over a single series only takes its labels away."""
COMPARED = re.compile(r" (?:>=|<=|>|<|==) |\n(?:>=|<=|>|<) ")
THRESHOLD = re.compile(r"(?<=[><=] )(\d+(?:\.\d+)?)(?=$|\n|\))")


def changes(expr: str) -> Iterator[tuple[str, str]]:
    """(what is wrong, the wrong expression)."""
    for match in COMPARED.finditer(expr):
        sign = match.group().strip()
        other = {">": "<", "<": ">", ">=": "<", "<=": ">", "==": "!="}[sign]
        yield f"{sign} negated at {match.start()}", _put(expr, match, match.group().replace(sign, other))
    for match in re.finditer(r"\nand on", expr):
        yield f"gate negated at {match.start()}", _put(expr, match, "\nunless on")
    for match in re.finditer(r"\nunless on", expr):
        yield f"unless becomes and at {match.start()}", _put(expr, match, "\nand on")
    yield from _without_clauses(expr)
    for match in THRESHOLD.finditer(expr):
        value = float(match.group(1))
        for wrong in _next_to(value):
            yield f"threshold {value:g} becomes {wrong:g}", _put(expr, match, f"{wrong:g}")
    for match in re.finditer(r"(?<=\n)(\d+(?:\.\d+)?) \* ", expr):
        value = float(match.group(1))
        for wrong in _next_to(value):
            yield f"factor {value:g} becomes {wrong:g}", _put(expr, match, f"{wrong:g} * ")
    if "namespace" in expr:
        yield "namespace dropped", re.sub(r", namespace(?=[,)])", "", expr)
    for match in SEVERAL.finditer(expr):
        yield (
            f"{match.group(1)} becomes min at {match.start()}",
            _put(expr, match, match.group().replace(match.group(1), "min", 1)),
        )


def _put(text: str, match: re.Match[str], new: str) -> str:
    return text[: match.start()] + new + text[match.end() :]


def _next_to(value: float) -> tuple[float, ...]:
    """A value too low and one too high: by one for counts, by a third for ratios, by half for times."""
    if value == int(value) and value <= 3:
        return (value - 1, value + 1) if value else (1.0,)
    return (value * 0.7, value * 1.3) if value < 1 else (value * 0.5, value * 2)


def _without_clauses(expr: str) -> Iterator[tuple[str, str]]:
    """The expression without one of its clauses."""
    parts = re.split(r"\n(?=(?:and|unless) on )", expr)
    for index in range(1, len(parts)):
        yield f"clause {index} dropped", "\n".join(parts[:index] + parts[index + 1 :])


def alert_mutants(rules: list[Rule], asked: frozenset[str]) -> list[Mutant]:
    """Broken copies of every alert that the stories tell about."""
    found = []
    for rule in rules:
        if rule.get("alert") not in asked:
            continue
        variants: list[tuple[str, Rule]] = [(what, {**rule, "expr": expr}) for what, expr in changes(rule["expr"])]
        if "for" in rule:
            variants.append(("for dropped", {key: item for key, item in rule.items() if key != "for"}))
            variants.append(("for of ten minutes more", {**rule, "for": f"{_seconds(rule['for']) + 600}s"}))
        else:
            variants.append(("for of ten minutes", {**rule, "for": "10m"}))
        if "keep_firing_for" in rule:
            variants.append(("not held", {key: item for key, item in rule.items() if key != "keep_firing_for"}))
        for what, variant in variants:
            name = f"m{len(found)}_{rule['alert']}"
            found.append(Mutant(what=f"{rule['alert']}: {what}", rule=_bare(variant, name), told=rule["alert"]))
    return found


def _seconds(text: str) -> int:
    return int(text[:-1]) * {"s": 1, "m": 60, "h": 3_600}[text[-1]]


def _bare(rule: Rule, name: str) -> Rule:
    return {key: item for key, item in rule.items() if key in ("expr", "for", "keep_firing_for")} | {"alert": name}


RECORDING_CHANGES: dict[str, Callable[[str], str]] = {
    "pods are added up": lambda expr: re.sub(r"\bmax by", "sum by", expr),
    "the least of the pods": lambda expr: re.sub(r"\bmax by", "min by", expr),
    "no memory": lambda expr: re.sub(r"last_over_time\((\w+(?:{[^}]*})?)\[10m\]\)", r"\1", expr),
    "memory of an hour": lambda expr: expr.replace("[10m]", "[1h]"),
    "remembered beside live": lambda expr: re.sub(
        r"max by \([^)]*\) \(\w+(?:{[^}]*})?\)\nor(?: on \([^)]*\))?\n", "", expr
    ),
    "a label is left empty": lambda expr: expr.replace('"none"', '""'),
    "namespace dropped": lambda expr: re.sub(r", namespace(?=[,)])", "", expr),
}
"""All recordings are built in one of three ways, so a way is broken for all of them at once."""


def broken_recordings(rules: list[Rule], change: Callable[[str], str]) -> list[Rule]:
    """All rules, with every recording of a metric changed."""
    return [{**rule, "expr": change(rule["expr"])} if "record" in rule else rule for rule in rules]
