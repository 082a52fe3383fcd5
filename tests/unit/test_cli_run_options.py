"""From arguments and a file to `RunOptions`: precedence, defaults, refusals."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nvrx_sre.cli.run_options import RunOptions, build_run_config, run_options
from nvrx_sre.core.errors import UserError


def _parse(*arguments: str) -> RunOptions:
    """Options as a command would get them; raises what the command line would report."""
    seen: list[RunOptions] = []

    @click.command()
    @run_options
    def command(options: RunOptions) -> None:
        seen.append(options)

    command.main(list(arguments), standalone_mode=False)
    return seen[0]


def test_defaults_name_the_run_and_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments a run lies in ./runs/train and lingers for its scraper."""
    monkeypatch.chdir(tmp_path)
    options = _parse()
    assert (options.run, options.run_dir, options.linger) == ("train", tmp_path / "runs" / "train", True)


def test_name_and_directory_derive_from_each_other(tmp_path: Path) -> None:
    """Either is enough, and a directory's name is made valid."""
    assert _parse("--run-dir", str(tmp_path / "My Run")).run == "my-run"
    assert _parse("--name", "nightly").run_dir.name == "nightly"


def test_a_bad_name_is_refused() -> None:
    """The name is a label: its alphabet is fixed."""
    with pytest.raises(UserError, match="not valid"):
        _parse("--name", "No Spaces")


def test_auto_capture_is_left_to_the_launcher() -> None:
    """None: chosen by measurement. The number of slots is 2 or 3."""
    assert _parse("--hot-every", "auto").hot_every is None
    assert (_parse().hot_slots, _parse("--hot-slots", "2").hot_slots) == (3, 2)
    with pytest.raises(click.BadParameter):
        _parse("--hot-slots", "4")


def test_owner_priority_and_the_way_of_ranks_reach_the_launcher() -> None:
    """`--label` and `--rank-metrics`; nothing said leaves the defaults to the catalog and the world."""
    options = _parse("--label", "team=core", "--label", "priority=dev", "--rank-metrics", "summary")
    config = build_run_config(options, command=("x.py",), nproc=2, config_items={})
    assert config.labels == {"team": "core", "priority": "dev"}
    assert config.rank_metrics == "summary"
    assert (_parse().labels, _parse().rank_metrics) == ({}, None)


@pytest.mark.parametrize("text", ["team", "team=", "team=two words", "priority=high", "owner=me"])
def test_a_label_that_no_rule_knows_is_refused(text: str) -> None:
    """Names and values are few, so that they can be labels."""
    with pytest.raises(UserError, match=r"--label .*team=TEXT"):
        _parse("--label", text)


@pytest.mark.parametrize("value", ["-1", "often"])
def test_a_bad_capture_interval_is_a_usage_error(value: str) -> None:
    """Neither negative nor text."""
    with pytest.raises(click.BadParameter):
        _parse("--hot-every", value)


def test_explicit_arguments_beat_the_file_beats_the_defaults(tmp_path: Path) -> None:
    """Three sources, in that order."""
    file = tmp_path / "run.toml"
    file.write_text("[checkpoint]\nsave_every = 7\nkeep = 4\n[deadlines]\nstep_s = 9\n")
    options = _parse("--config", str(file), "--keep", "5")
    assert (options.save_every, options.keep, options.standbys) == (7, 5, 1)
    assert options.limits.deadlines.step_s == 9.0


def test_a_file_value_passes_the_checks_of_the_argument(tmp_path: Path) -> None:
    """A fraction of a step, or a port out of range, is refused from a file as well."""
    file = tmp_path / "run.toml"
    for text in ("[checkpoint]\nsave_every = 1.5\n", "[metrics]\nport = 70000\n"):
        file.write_text(text)
        with pytest.raises(click.BadParameter):
            _parse("--config", str(file))


def test_faults_of_arguments_and_plan_add_up(tmp_path: Path) -> None:
    """Both ways of naming faults may be used together."""
    plan = tmp_path / "plan.yaml"
    plan.write_text("- sigkill@0:9\n")
    options = _parse("--fault", "exception@1:4", "--fault-plan", str(plan))
    assert options.fault_specs == ("exception@1:4", "sigkill@0:9")


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://me:pw@[::1]:4318/", "https://me:pw@[::1]:4318/v1/traces"),
        ("http://collector?tenant=a", "http://collector/v1/traces?tenant=a"),
        ("http://collector:4318/otlp/v1/traces", "http://collector:4318/otlp/v1/traces"),
        ("http://gateway/in/", "http://gateway/in/"),
    ],
)
def test_a_collector_is_given_by_its_address_or_by_a_path(endpoint: str, url: str) -> None:
    """By OTLP's convention: nobody takes traces at the root."""
    assert _parse("--otlp-endpoint", endpoint).otlp_endpoint == url


@pytest.mark.parametrize(
    "endpoint", ["collector:4318", "grpc://collector:4317", "http://", "http://c:port", "http://[::"]
)
def test_what_is_no_url_of_a_collector_is_refused(endpoint: str) -> None:
    """At once, since a run would go on without its traces."""
    with pytest.raises(UserError, match=r"^--otlp-endpoint .*: give a URL, e\.g\. http://collector:4318$"):
        _parse("--otlp-endpoint", endpoint)


def test_no_linger_means_none() -> None:
    """Zero seconds switch it off, a number sets the limit."""
    assert not _parse("--metrics-linger", "0").linger
    assert _parse("--metrics-linger", "3").limits.telemetry.metrics_linger_s == 3.0


def test_a_summary_that_could_not_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    """Its folder must be there, unless it is the run's own, which the launcher makes."""
    with pytest.raises(UserError, match=f"cannot write .*: there is no folder {tmp_path / 'nowhere'}; make it"):
        _parse("--summary", str(tmp_path / "nowhere" / "s.json"))
    with pytest.raises(UserError, match="it is a folder; name a file"):
        _parse("--summary", str(tmp_path))
    inside = tmp_path / "run" / "told" / "s.json"
    assert _parse("--run-dir", str(tmp_path / "run"), "--summary", str(inside)).summary == inside


def test_bandwidth_is_given_in_megabytes() -> None:
    """The option is for people, the configuration in bytes."""
    assert _parse("--write-bandwidth", "2").write_bandwidth_bytes_s == 2e6
    for refused in ("0", "-1", "nan", "inf", "1e-9"):
        with pytest.raises((UserError, click.UsageError), match=r"write-bandwidth|is not in the range"):
            _parse("--write-bandwidth", refused)


def test_the_run_configuration_holds_the_options(tmp_path: Path) -> None:
    """What was asked for is what the launcher is told."""
    options = _parse("--run-dir", str(tmp_path / "r"), "--save-every", "9", "--start-fresh", "--summary", "s.json")
    config = build_run_config(options, command=("script.py",), nproc=3, config_items={"a": "b"})
    assert (config.nproc, config.min_world_size, config.save_every, config.start_fresh) == (3, 3, 9, True)
    assert config.summary is not None and config.summary.is_absolute()


def test_help_lists_every_option() -> None:
    """The runner of click shows the help without error."""

    @click.command()
    @run_options
    def command(options: RunOptions) -> None:
        raise AssertionError(options)

    shown = CliRunner().invoke(command, ["--help"]).output
    for flag in ("--run-dir", "--fault-plan", "--metrics-linger", "--step-deadline", "--start-fresh"):
        assert flag in shown
