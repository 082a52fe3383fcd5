"""Alertmanager's configuration and texts, checked by amtool: routes, inhibition, and a payload rendered."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from nvrx_sre.monitoring import alertmanager, assets
from nvrx_sre.monitoring.alerts import alert_rules
from nvrx_sre.monitoring.inhibition import INHIBITIONS, SIGNS
from nvrx_sre.monitoring.notices import FACTS, RESOLVED_TEXT
from nvrx_sre.monitoring.values import Values

VALUES = Values()
RECORDING = Path(__file__).resolve().parents[1] / "recordings" / "notification.json"
"""What Alertmanager posted for a crash loop, firing and resolved (tests/live/test_live_notifications.py says how)."""


def amtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The real amtool."""
    found = shutil.which("amtool")
    assert found is not None, "install prometheus-alertmanager"
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The shipped example, with its templates where it looks for them."""
    file = tmp_path / "alertmanager.yaml"
    text = assets.asset(assets.ALERTMANAGER_FILE).read_text()
    file.write_text(text.replace(alertmanager.TEMPLATES_GLOB, str(assets.asset(assets.TEMPLATES_FILE))))
    return file


def test_amtool_accepts_the_example_and_its_templates(example: Path) -> None:
    """Configuration and one template file."""
    checked = amtool("check-config", str(example))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "1 templates" in checked.stdout


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ({"severity": "critical"}, "page"),
        ({"severity": "warning"}, "ticket"),
        ({"severity": "info"}, "none"),
        ({"severity": "critical", "priority": "prod"}, "page"),
        ({"severity": "critical", "priority": "dev"}, "ticket"),
        ({"severity": "info", "priority": "dev"}, "none"),
        ({"alertname": "NvrxWatchdog", "severity": "info"}, "deadman"),
        ({"alertname": "NvrxWatchdog", "severity": "critical"}, "deadman"),
    ],
)
def test_routes(example: Path, labels: dict[str, str], receiver: str) -> None:
    """By severity; a run of priority dev never pages; the watchdog goes to the dead man's switch alone."""
    given = [f"{name}={value}" for name, value in {"run": "demo", **labels}.items()]
    routed = amtool("config", "routes", "test", f"--config.file={example}", *given)
    assert routed.stdout.strip() == receiver, routed.stderr


def test_no_beat_of_the_watchdog_is_skipped() -> None:
    """Alertmanager looks several times a beat whether one is due, and the switch's time-out bears one that is lost."""
    text = assets.asset(assets.ALERTMANAGER_FILE).read_text()
    route = next(item for item in yaml.safe_load(text)["route"]["routes"] if item["receiver"] == "deadman")
    assert (route["group_interval"], route["repeat_interval"]) == ("10s", "1m")
    longest_s = alertmanager.DEADMAN_INTERVAL_S + alertmanager.DEADMAN_GROUP_INTERVAL_S
    assert 2 * longest_s < alertmanager.DEADMAN_TIMEOUT_S
    assert "after 3m without a beat" in text


def test_the_ladder_of_inhibition() -> None:
    """Halted over looping over overdue over the signs; what is blind silences the signs and nothing else."""
    assert dict(INHIBITIONS) == {
        "NvrxRunHalted": ("NvrxCrashLooping", "NvrxRecoveryOverdue", *SIGNS),
        "NvrxCrashLooping": ("NvrxRecoveryOverdue", "NvrxRendezvousStuck", *SIGNS),
        "NvrxRecoveryOverdue": SIGNS,
        "NvrxRendezvousStuck": ("NvrxRecoveryOverdue",),
        "NvrxTargetMissing": SIGNS,
        "NvrxLauncherStuck": SIGNS,
    }


def test_targets_are_told_before_what_inhibits_them() -> None:
    """Alerts go to Alertmanager one by one: a target that ended later than its source would page for a moment."""
    document = yaml.safe_load(assets.asset(assets.RULES_FILE).read_text())
    order = [rule["alert"] for rule in document["groups"][0]["rules"] if "alert" in rule]
    for source, targets in INHIBITIONS:
        last = max(len(order) - 1 - order[::-1].index(target) for target in targets)
        assert order.index(source) > last, source


def test_what_is_named_is_an_alert() -> None:
    """A renamed alert would silently page twice."""
    names = {rule.name for rule in alert_rules(VALUES)}
    inhibiting = {source for source, _ in INHIBITIONS}
    inhibited = {target for _, targets in INHIBITIONS for target in targets}
    assert (inhibiting | inhibited | {alertmanager.WATCHDOG}) - names == set()


def test_nothing_crosses_runs() -> None:
    """All labels of the key are equal, and the source carries each of them: two missing ones would be equal too."""
    document = yaml.safe_load(assets.asset(assets.ALERTMANAGER_FILE).read_text())
    for rule in document["inhibit_rules"]:
        assert rule["equal"] == list(VALUES.group_labels)
        assert {f'{key}=~".+"' for key in VALUES.group_labels} < set(rule["source_matchers"])


# --- texts ----------------------------------------------------------------------------------------------------


def render(template: str, payload: dict[str, Any], directory: Path) -> str:
    """amtool's rendering of one template of the shipped file."""
    data = directory / "payload.json"
    data.write_text(json.dumps(payload))
    done = amtool(
        *("template", "render", f"--template.glob={assets.asset(assets.TEMPLATES_FILE)}"),
        *(f"--template.data={data}", f'--template.text={{{{ template "{template}" . }}}}'),
    )
    assert done.returncode == 0, done.stderr
    assert "<no value>" not in done.stdout
    return done.stdout.strip()


def recorded(status: str) -> dict[str, Any]:
    """The recorded payload with this status."""
    value: dict[str, Any] = json.loads(RECORDING.read_text())[status]
    return value


def test_a_page_answers_the_first_questions_in_order(tmp_path: Path) -> None:
    """Summary, verdict, progress, culprit host, idle devices, then the links, each from the recorded payload."""
    payload = recorded("firing")
    (alert,) = payload["alerts"]
    lines = render("nvrx.slack.text", payload, tmp_path).splitlines()
    assert lines[0] == f"*{alert['annotations']['summary']}*"
    assert lines[1:5] == [f"{label}: {alert['annotations'][name]}" for label, name in FACTS]
    assert alert["annotations"]["description"] in lines
    assert (
        f"<{alert['annotations']['runbook_url']}|Runbook> | <{alert['annotations']['dashboard_url']}|Dashboard>"
        in lines
    )
    assert lines[-1].startswith("Silence: http")


def test_the_facts_of_the_recorded_page_are_those_of_the_run() -> None:
    """In words: what it is, that nothing is gained, which host, and what stands idle."""
    facts = recorded("firing")["alerts"][0]["annotations"]
    assert facts["verdict"] == "crash loop: no progress"
    assert re.fullmatch(r"last new step .+ ago", facts["progress"])
    assert re.fullmatch(r"rank 0 on \S+", facts["culprit"])
    assert re.fullmatch(r"1 rank held", facts["idle"])
    assert "resolved" not in facts or not facts["resolved"]


def silence_filter(payload: dict[str, Any], directory: Path) -> dict[str, tuple[str, str]]:
    """Label -> (operator, value) of the link's filter, read as Alertmanager's page reads it: a `+` is a `+`."""
    link = urlsplit(render("nvrx.silence", payload, directory))
    text = unquote(link.fragment.partition("?filter=")[2])
    assert (text[0], text[-1]) == ("{", "}"), text
    found = re.findall(r'(\w+)(=~|=)"([^"]*)"(?:,|$)', text[1:-1])
    assert ",".join(f'{name}{operator}"{value}"' for name, operator, value in found) == text[1:-1]
    return {name: (operator, value) for name, operator, value in found}


def several_alerts(*alerts: tuple[str, str]) -> dict[str, Any]:
    """The recorded page with these alerts (name, status) in its group instead of one."""
    payload = recorded("firing")
    (alert,) = payload["alerts"]
    payload["alerts"] = [
        {**alert, "status": status, "labels": {**alert["labels"], "alertname": name}} for name, status in alerts
    ]
    payload["status"] = "firing" if any(status == "firing" for _, status in alerts) else "resolved"
    if len({name for name, _ in alerts}) > 1:
        del payload["commonLabels"]["alertname"]
    return payload


@pytest.mark.parametrize(
    ("alerts", "names"),
    [
        ([("NvrxRunHalted", "firing")], "NvrxRunHalted"),
        ([("NvrxRunStalled", "firing"), ("NvrxTargetMissing", "firing")], "NvrxRunStalled|NvrxTargetMissing"),
        ([("NvrxGoodputBurn", "firing"), ("NvrxGoodputBurn", "firing")], "NvrxGoodputBurn"),
        ([("NvrxSlowRank", "resolved"), ("NvrxFlapping", "firing")], "NvrxFlapping"),
        ([("NvrxSlow", "firing"), ("NvrxSlowRank", "firing"), ("Nvrx", "firing")], "NvrxSlow|NvrxSlowRank|Nvrx"),
        ([("Disk full (/)", "firing"), ("Disk full (/)", "firing")], "Disk.full...."),
        ([("NvrxSlowRank", "resolved"), ("NvrxFlapping", "resolved")], "NvrxSlowRank|NvrxFlapping"),
    ],
)
def test_the_silence_link_names_this_run_and_what_fires(
    tmp_path: Path, alerts: list[tuple[str, str]], names: str
) -> None:
    """Each name once, also where the group has several; never the run alone, which would silence its next alert."""
    payload = several_alerts(*alerts)
    key = {name: ("=", value) for name, value in payload["groupLabels"].items()}
    assert set(key) == {"cluster", "namespace", "run"}
    assert silence_filter(payload, tmp_path) == {**key, "alertname": ("=~", names)}


def test_the_silence_link_escapes_what_labels_hold(tmp_path: Path) -> None:
    """Spaces, signs of an address and of a filter reach Alertmanager as they are."""
    payload = recorded("firing")
    payload["groupLabels"] = {"cluster": "east 1 + 2", "namespace": "a&b=c", "run": "100%/x,y"}
    found = silence_filter(payload, tmp_path)
    assert {name: found[name][1] for name in payload["groupLabels"]} == payload["groupLabels"]


def test_a_resolved_page_says_how_it_ended(tmp_path: Path) -> None:
    """Outage and rollback, in title and text; no link to a silence any more."""
    payload = recorded("resolved")
    assert render("nvrx.title", payload, tmp_path).startswith("[RESOLVED] NvrxCrashLooping: run ")
    text = render("nvrx.slack.text", payload, tmp_path)
    assert re.fullmatch(r"NvrxCrashLooping: recovered in [^,]+s, rollback \d+ steps?", text), text
    assert render("nvrx.slack.color", payload, tmp_path) == "good"


def test_a_foreign_alert_is_rendered_without_empty_lines(tmp_path: Path) -> None:
    """Facts that it does not have take no line; when it resolves it says at least for how long it fired."""
    payload = recorded("firing")
    for name in [*(name for _, name in FACTS), "resolved"]:
        payload["alerts"][0]["annotations"].pop(name, None)
    text = render("nvrx.text", payload, tmp_path)
    assert not any(f"{label}:" in text for label, _ in FACTS)
    assert "\n\n" not in text
    payload["status"] = payload["alerts"][0]["status"] = "resolved"
    payload["alerts"][0] |= {"startsAt": "2026-01-02T03:04:05.678Z", "endsAt": "2026-01-02T03:09:17.999Z"}
    assert render("nvrx.text", payload, tmp_path) == f"NvrxCrashLooping: {RESOLVED_TEXT} 5m12s"


def test_every_template_of_the_example_exists_and_renders(tmp_path: Path) -> None:
    """All texts that the example's receivers ask for, for a page and for its end."""
    text = assets.asset(assets.ALERTMANAGER_FILE).read_text()
    names = sorted(set(re.findall(r'template "([^"]+)"', text)))
    assert len(names) >= 12
    for name in names:
        assert render(name, recorded("firing"), tmp_path) or name == "nvrx.resolved"
        render(name, recorded("resolved"), tmp_path)
