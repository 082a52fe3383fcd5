"""Our writer of the exposition against prometheus_client's: byte for byte, in both forms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Exemplar

from nvrx_sre.telemetry.exposition import Labels, content_type_for, write
from nvrx_sre.telemetry.folded import FoldedRun
from nvrx_sre.testing.clock import ManualClock
from tests.stories import RUN, Story, exception_story, fallback_story, ns

CLASSIC = ""
OPEN = "application/openmetrics-text; version=1.0.0"
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.1"
)
"""What Prometheus 3 sends."""


class OneFamily:
    """A collector of families that are given."""

    def __init__(self, *families: Family) -> None:
        self.families = families

    def collect(self) -> tuple[Family, ...]:
        """Those."""
        return self.families


def both(collector: object, accept: str) -> tuple[str, str]:
    """Our text and theirs."""
    encode, _ = choose_encoder(accept)
    ours = write(collector.collect(), content_type_for(accept))  # type: ignore[attr-defined]  # any collector
    return ours.decode(), encode(collector).decode()  # type: ignore[arg-type]  # any collector


@pytest.mark.parametrize("accept", [CLASSIC, OPEN, PROMETHEUS, "text/plain;version=1.0.0"])
@pytest.mark.parametrize("story", [exception_story, fallback_story])
def test_a_run_is_written_as_prometheus_client_writes_it(story: Callable[[], Story], accept: str) -> None:
    """Every family of the catalog, with exemplars, after faults and saves; the second scrape as the first."""
    views = FoldedRun(RUN, clock=ManualClock(wall_offset_ns=ns(1000.0)))
    for record in story().records:
        views.apply(record)
    views.metrics.mark_synced()
    for _ in range(2):
        ours, theirs = both(views.metrics.registry, accept)
        assert ours == theirs
        assert "nvrx_incidents_total{" in ours


@pytest.mark.parametrize("accept", [CLASSIC, OPEN])
def test_metrics_of_the_librarys_own_kinds_are_written_as_well(accept: str) -> None:
    """The brake's counters, whose moment of creation is a gauge of its own in the classic form."""
    registry = CollectorRegistry()
    Counter("c_total", 'help \\ of\n"c"', ["kind"], registry=registry).labels('a"\\\n').inc(3)
    Gauge("g", "none", registry=registry).set(math.inf)
    ours, theirs = both(registry, accept)
    assert ours == theirs
    assert 'c_total{kind="a\\"\\\\\\n"} 3.0' in ours


@given(
    st.dictionaries(st.sampled_from(["run", "le", "fault"]), st.text(max_size=8)),
    st.floats(),
    st.none() | st.floats(0, 1e9),
)
def test_any_value_and_label_text(labels: dict[str, str], value: float, exemplar: float | None) -> None:
    """Numbers as Go spells them, label values escaped, with and without labels kept beforehand."""
    for kept in (labels, Labels(labels)):
        family = Family("nvrx_x", "x", "histogram")
        shown = None if exemplar is None else Exemplar({"trace_id": "ab"}, exemplar, 12.5)
        family.add_sample("nvrx_x_bucket", kept, value, exemplar=shown)
        for accept in (CLASSIC, OPEN):
            ours, theirs = both(OneFamily(family), accept)
            assert ours == theirs


def test_an_escaping_that_would_change_our_names_is_not_promised() -> None:
    """`dots` doubles every underscore; what is answered says that nothing was escaped so."""
    assert "escaping=underscores" in content_type_for("text/plain;version=1.0.0;escaping=dots")
    assert "escaping=allow-utf-8" in content_type_for(PROMETHEUS)
