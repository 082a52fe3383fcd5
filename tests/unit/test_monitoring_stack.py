"""Parts of the stack that need no process: configuration, webhook bodies, missing tools, assets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from nvrx_sre.core.errors import UserError
from nvrx_sre.monitoring import assets, query, stack
from nvrx_sre.monitoring.promtool import samples
from nvrx_sre.monitoring.webhook import NOTIFICATIONS_MAX, WebhookReceiver, parse_notification
from tests.certificates import make_certificate

ALERT = {"status": "firing", "labels": {"alertname": "NvrxRunHalted", "severity": "critical", "run": "demo"}}
BODY = json.dumps({"receiver": "page", "status": "firing", "alerts": [ALERT]}).encode()


def test_prometheus_scrapes_what_the_targets_file_says() -> None:
    """Interval, targets file, rules and Alertmanager are in the configuration."""
    config = stack.StackConfig(scrape_interval_s=0.5)
    document = yaml.safe_load(stack.prometheus_config(config, Path("/r.yaml"), Path("/d"), "http://127.0.0.1:9093"))
    assert document["global"]["scrape_interval"] == document["global"]["evaluation_interval"] == "500ms"
    files = [job["file_sd_configs"][0]["files"] for job in document["scrape_configs"]]
    assert files == [["/d/targets.json"], ["/d/targets-with-password.json"]]
    assert not any({"tls_config", "basic_auth"} & set(job) for job in document["scrape_configs"])
    assert document["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] == ["127.0.0.1:9093"]
    assert document["rule_files"] == ["/r.yaml"]


def test_only_endpoints_that_ask_get_the_password(tmp_path: Path) -> None:
    """Both jobs check certificates; one has the name of the password's file, and nothing has the password."""
    password = tmp_path / "password"
    password.write_text("s3cret\n")
    password.chmod(0o600)
    ca = make_certificate(tmp_path).certificate
    access = stack.ScrapeAccess(ca=ca, server_name="launcher.example", user="prom", password=password)
    text = stack.prometheus_config(stack.StackConfig(access=access), Path("/r"), Path("/d"), "http://127.0.0.1:1")
    opened, locked = yaml.safe_load(text)["scrape_configs"]
    assert opened["tls_config"] == locked["tls_config"] == {"ca_file": str(ca), "server_name": "launcher.example"}
    assert "basic_auth" not in opened
    assert locked["basic_auth"] == {"username": "prom", "password_file": str(password)}
    assert "s3cret" not in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"user": "prom"}, "given together"),
        ({"password": "private"}, "given together"),
        ({"server_name": "a.example"}, "give the file of their CA too"),
        ({"user": "prom", "password": "open"}, "can be read by others"),
        ({"user": "prom", "password": "two"}, "the password and nothing else"),
        ({"ca": "private"}, "cannot be used"),
        ({"ca": "none"}, "cannot be used"),
    ],
)
def test_an_access_that_cannot_work_is_refused(tmp_path: Path, given: dict[str, str], message: str) -> None:
    """Before a server is started, in one line."""
    for name, text, mode in (("private", "a\n", 0o600), ("open", "a\n", 0o644), ("two", "a\nb\n", 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    files = {name: tmp_path / given[name] for name in ("password", "ca") if name in given}
    with pytest.raises(UserError, match=message):
        stack.ScrapeAccess(**{**given, **files})  # type: ignore[arg-type]  # paths take the place of their names


def test_a_target_is_host_path_scheme_and_labels() -> None:
    """As file discovery reads it; without a path it is the usual one."""
    target = stack.ScrapeTarget(url="https://127.0.0.1:9400/m", labels={"cluster": "c"})
    assert target.to_group() == {
        "targets": ["127.0.0.1:9400"],
        "labels": {"__scheme__": "https", "__metrics_path__": "/m", "cluster": "c"},
    }
    assert stack.ScrapeTarget(url="http://h:1").to_group()["labels"]["__metrics_path__"] == "/metrics"


@pytest.mark.parametrize("url", ["127.0.0.1:9400", "ftp://h/metrics", "http:///metrics"])
def test_a_target_that_is_no_http_address_is_refused(url: str) -> None:
    """It would only be found out by a scrape that fails."""
    with pytest.raises(UserError, match="not an http or https address"):
        stack.ScrapeTarget(url=url)


@pytest.mark.parametrize("changes", [{"scrape_interval_s": 0.0}, {"group_wait_s": -1.0}])
def test_a_stack_that_cannot_work_is_refused(changes: dict) -> None:
    """An interval that is not positive."""
    with pytest.raises(UserError):
        stack.StackConfig(**changes)


def test_missing_tools_are_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing on the PATH: no stack, and a message that says what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stack.find_tools() is None
    with pytest.raises(UserError, match="install prometheus"):
        stack.MonitoringStack(stack.StackConfig())


def test_debians_name_of_alertmanager_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`prometheus-alertmanager` serves where `alertmanager` is missing, and comes second where it is not."""
    for name in ("prometheus", "prometheus-alertmanager"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = stack.find_tools()
    assert found is not None
    assert found.alertmanager == str(tmp_path / "prometheus-alertmanager")
    (tmp_path / "alertmanager").write_text("#!/bin/sh\n")
    (tmp_path / "alertmanager").chmod(0o755)
    found = stack.find_tools()
    assert found is not None
    assert found.alertmanager == str(tmp_path / "alertmanager")


def test_a_notification_is_parsed() -> None:
    """Receiver, status and alerts as Alertmanager sent them."""
    notification = parse_notification(BODY)
    assert (notification.receiver, notification.names(), notification.severities()) == (
        "page",
        ["NvrxRunHalted"],
        {"critical"},
    )
    assert notification.names("resolved") == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"{}", b'{"receiver": "p", "status": "firing", "alerts": [{}]}', b'{"alerts": 1}', b"\xff"],
)
def test_what_is_no_notification_is_refused(body: bytes) -> None:
    """Anything else raises `ValueError`; the receiver keeps nothing of it."""
    with pytest.raises(ValueError):
        parse_notification(body)
    receiver = WebhookReceiver()
    assert not receiver.accept(body)
    assert receiver.notifications() == []
    receiver.stop()


def test_the_receiver_is_bounded_and_counts_what_it_drops() -> None:
    """Older notifications give way."""
    receiver = WebhookReceiver()
    for _ in range(NOTIFICATIONS_MAX + 3):
        assert receiver.accept(BODY)
    assert (len(receiver.notifications()), receiver.num_dropped) == (NOTIFICATIONS_MAX, 3)
    assert receiver.wait_for(lambda items: len(items) == NOTIFICATIONS_MAX, 0.0)
    assert not receiver.wait_for(lambda items: not items, 0.0)
    receiver.stop()


def test_only_http_addresses_are_queried() -> None:
    """No file scheme, no bare host."""
    for url in ("file:///etc/passwd", "127.0.0.1:9090"):
        with pytest.raises(UserError, match="not an http or https address"):
            query.http_get(url)


def test_a_gap_in_a_series_becomes_one_stale_marker() -> None:
    """promtool's notation: nothing before the first sample, stale once after the last."""
    assert samples(lambda at: at if 20 <= at < 40 else None, 60, 10) == "_ _ 20.0 30.0 stale _ _"


def test_an_unknown_runbook_is_refused_with_the_known_names() -> None:
    """The message lists what there is; a known name gives its page."""
    with pytest.raises(UserError, match=r"NvrxCrashLooping.*NvrxRunHalted"):
        assets.runbook_text("NvrxNothing")
    assert assets.runbook_text("NvrxRunHalted").startswith("# NvrxRunHalted\n")


def test_assets_are_found_in_a_wheel_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`_assets` inside the package wins; nothing at all is a clear error."""
    package = tmp_path / "site" / "nvrx_sre"
    package.mkdir(parents=True)
    monkeypatch.setattr(assets, "PACKAGE_ROOT", package)
    with pytest.raises(UserError, match="install the package again"):
        assets.assets_root()
    for kind in assets.ASSET_KINDS:
        (package / "_assets" / kind).mkdir(parents=True)
    assert assets.assets_root() == package / "_assets"
    assert not assets.is_checkout(assets.assets_root())
