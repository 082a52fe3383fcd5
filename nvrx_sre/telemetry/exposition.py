"""Families as text: the classic format of Prometheus, and OpenMetrics.

prometheus_client decides which form a scraper wants; its writer looks at every letter of every name, at every scrape,
and took most of a scrape's time. Names here are those of catalogs, which are checked when they are built, so only
label values and help texts are escaped, and labels that are exposed again and again (`Labels`) are written once.

Invariants: for families with such names the text is, byte for byte, that of prometheus_client. Thread-safe: nothing is
kept here. Must not: write timestamps or native histograms, which no family of ours has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Exemplar, Sample

_CREATED = "_created"
"""Suffix of a sample that the classic format shows as a gauge of its own."""
_WORDS = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


class Labels(dict[str, str]):
    """Labels of a series that is exposed at every scrape. Not to be changed: `text` is made once."""

    __slots__ = ("text",)

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(labels)
        self.text = _text_of(labels)


def content_type_for(accept: str) -> str:
    """Content type of the form that a scraper with this `Accept` header gets."""
    content_type = choose_encoder(accept)[1]
    return content_type.replace("escaping=dots", "escaping=underscores")  # there is nothing to escape in our names


def write(families: Iterable[Family], content_type: str) -> bytes:
    """The families in the form of `content_type`. Blocks for the making of the families."""
    lines: list[str] = []
    if content_type.startswith("application/openmetrics-text"):
        for family in families:
            lines.append(f"# HELP {family.name} {_escaped(family.documentation)}\n")
            lines.append(f"# TYPE {family.name} {family.type}\n")
            lines += [_line(sample, with_exemplar=True) for sample in family.samples]
        lines.append("# EOF\n")
    else:
        for family in families:
            _add_classic(lines, family)
    return "".join(lines).encode()


def _add_classic(lines: list[str], family: Family) -> None:
    name, kind = family.name, family.type
    if kind == "counter":
        name += "_total"
    elif kind == "info":
        name, kind = f"{name}_info", "gauge"
    described = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    created = [sample for sample in family.samples if sample.name == family.name + _CREATED]
    lines.append(f"# HELP {name} {described}\n# TYPE {name} {kind}\n")
    lines += [_line(sample) for sample in family.samples if sample.name != family.name + _CREATED]
    if created:
        lines.append(f"# HELP {family.name}{_CREATED} {described}\n# TYPE {family.name}{_CREATED} gauge\n")
        lines += map(_line, created)


def _line(sample: Sample, *, with_exemplar: bool = False) -> str:
    labels = sample.labels
    text = labels.text if type(labels) is Labels else _text_of(labels)
    exemplar = _exemplar(sample.exemplar) if with_exemplar and sample.exemplar is not None else ""
    return f"{sample.name}{text} {_number(sample.value)}{exemplar}\n"


def _exemplar(exemplar: Exemplar) -> str:
    stamp = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {_text_of(exemplar.labels) or '{}'} {_number(exemplar.value)}{stamp}"


def _number(value: float) -> str:
    """As Go spells it, which takes to exponents sooner than Python does."""
    text = repr(float(value))
    dot = text.find(".")
    if dot > 6 and value > 0:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+{dot - 1:02d}"
    return _WORDS.get(text, text)


def _text_of(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
