"""The catalog is the one source of metric names, labels and documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_sre.telemetry import catalog, reference
from nvrx_sre.telemetry.metric import Label, Metric, MetricType, Scope, Unit

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_is_what_the_catalog_says() -> None:
    """Run `python -m nvrx_sre.telemetry.reference` after a change of the catalog."""
    assert (ROOT / reference.DOCUMENT).read_text() == reference.render()


def test_every_promised_metric_is_in_the_catalog() -> None:
    """The names that dashboards, rules and people rely on."""
    promised = """
        nvrx_build_info nvrx_run_info nvrx_wall_seconds_total nvrx_time_seconds_total nvrx_open_interval_seconds
        nvrx_steps_total nvrx_tokens_total nvrx_step_high_water nvrx_last_new_step_timestamp_seconds nvrx_loss
        nvrx_faults_total nvrx_restarts_total nvrx_restarts_since_progress nvrx_incidents_total
        nvrx_incident_opened_timestamp_seconds nvrx_incident_root_rank nvrx_outage_seconds nvrx_detection_seconds
        nvrx_rollback_steps nvrx_budget_used nvrx_budget_limit nvrx_run_state_entered_timestamp_seconds
        nvrx_phase_deadline_seconds nvrx_world_size nvrx_world_size_configured nvrx_world_size_min
        nvrx_restores_total nvrx_restored_step nvrx_saves_total nvrx_checkpoint_rejected_total
        nvrx_checkpoint_captured_timestamp_seconds nvrx_checkpoint_interval_expected_seconds
        nvrx_checkpoint_saturation_ratio nvrx_launcher_loop_timestamp_seconds nvrx_standby_ready
        nvrx_halted_timestamp_seconds nvrx_goodput_ratio nvrx_telemetry_dropped_total nvrx_telemetry_errors_total
        nvrx_generations_total nvrx_launcher_starts_total nvrx_preemptions_total nvrx_last_step_timestamp_seconds
    """
    assert set(promised.split()) <= set(catalog.CATALOG)


LABELS_PROMISED = {
    "nvrx_build_info": ("version", "catalog"),
    "nvrx_run_info": ("team", "priority", "config"),
    "nvrx_rank_info": ("rank", "node", "gpu_uuid", "pod"),
    "nvrx_time_seconds_total": ("state",),
    "nvrx_gpu_seconds_total": ("state",),
    "nvrx_steps_total": ("kind",),
    "nvrx_tokens_total": ("kind",),
    "nvrx_faults_total": ("fault",),
    "nvrx_restarts_total": ("layer", "outcome"),
    "nvrx_incidents_total": ("verdict",),
    "nvrx_outage_seconds": ("layer",),
    "nvrx_detection_seconds": ("detector",),
    "nvrx_rollback_steps": (),
    "nvrx_budget_used": ("cap",),
    "nvrx_budget_limit": ("cap",),
    "nvrx_run_state_entered_timestamp_seconds": ("state",),
    "nvrx_phase_entered_timestamp_seconds": ("phase",),
    "nvrx_phase_deadline_seconds": ("phase",),
    "nvrx_rendezvous_nodes": ("state",),
    "nvrx_restores_total": ("tier",),
    "nvrx_saves_total": ("tier", "outcome"),
    "nvrx_checkpoint_captured_timestamp_seconds": ("tier",),
    "nvrx_node_faults_total": ("node", "suspect"),
}
"""Family -> labels that rules and dashboards of a site may join on."""


@pytest.mark.parametrize("name", LABELS_PROMISED)
def test_every_promised_label_is_there(name: str) -> None:
    """A family has at least these labels; a histogram no `fault` (it is a counter's label)."""
    metric = catalog.CATALOG[name]
    assert set(LABELS_PROMISED[name]) <= set(metric.label_names)
    assert metric.type is not MetricType.HISTOGRAM or "fault" not in metric.label_names


def test_every_histogram_has_its_maximum_beside_it() -> None:
    """Seconds are told apart from 0.05 to 3,600; what lies beyond the last bucket is in the maximum, labels alike."""
    histograms = [metric for metric in catalog.CATALOG.values() if metric.type is MetricType.HISTOGRAM]
    assert len(histograms) >= 5
    for metric in histograms:
        stem, _, unit = metric.name.rpartition("_")
        greatest = catalog.CATALOG[f"{stem}_max_{unit}"]
        assert (greatest.type, greatest.label_names) == (MetricType.GAUGE, metric.label_names)
        if metric.unit is Unit.SECONDS:
            assert (metric.buckets[0], metric.buckets[-1]) == (0.05, 3600.0)


def test_series_stay_within_the_budget() -> None:
    """A leader exports at most 1,500 series."""
    assert catalog.num_series() <= 1500


def test_a_sample_name_leads_to_its_metric() -> None:
    """Histogram suffixes included, nothing else."""
    assert catalog.metric_of("nvrx_outage_seconds_bucket") is catalog.OUTAGE_SECONDS
    assert catalog.metric_of("nvrx_outage_seconds") is None
    assert catalog.metric_of("up") is None
    assert "nvrx_faults_total" in catalog.sample_names()


@pytest.mark.parametrize(
    ("name", "kind", "labels"),
    [
        ("nvrx_things", MetricType.COUNTER, ()),
        ("nvrx_things_total", MetricType.GAUGE, ()),
        ("things_total", MetricType.COUNTER, ()),
        ("nvrx_things", MetricType.GAUGE, (Label(name="step", values=()),)),
        ("nvrx_things", MetricType.HISTOGRAM, ()),
    ],
)
def test_a_malformed_metric_cannot_be_declared(name: str, kind: MetricType, labels: tuple[Label, ...]) -> None:
    """Suffixes, prefix, closed labels and buckets are checked at import."""
    with pytest.raises(AssertionError):
        Metric(name=name, type=kind, unit=Unit.COUNT, scope=Scope.JOB, help="", labels=labels)
