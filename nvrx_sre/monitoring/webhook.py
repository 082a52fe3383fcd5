"""A webhook receiver in this process: keeps what Alertmanager sends, and lets a caller wait for it.

Model: one HTTP server thread on a free loopback port; each accepted POST becomes one `Notification`. A body
that is not Alertmanager's webhook JSON is answered 400 and counted. Bounds: `BODY_BYTES_MAX` a request,
`NOTIFICATIONS_MAX` kept (older ones drop out and are counted), `REQUEST_TIMEOUT_S` a request.

Thread safety: all methods may be called from any thread. Must not: act on what it receives.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

from nvrx_sre.core import http_server

BODY_BYTES_MAX = 1 << 20
NOTIFICATIONS_MAX = 1_000
REQUEST_TIMEOUT_S = 5.0
MAX_REQUESTS = 16


@dataclass(frozen=True, kw_only=True)
class Notification:
    """One message of Alertmanager: a group of alerts for one receiver."""

    receiver: str
    status: str
    """`firing` or `resolved`."""
    alerts: tuple[dict[str, Any], ...]
    """Alerts of the group as sent: status, labels, annotations, startsAt, endsAt."""
    body: dict[str, Any]
    """The whole message, which is what templates are rendered from."""

    def names(self, status: str = "firing") -> list[str]:
        """Names of the alerts with `status`, sorted."""
        return sorted(item["labels"]["alertname"] for item in self.alerts if item["status"] == status)

    def severities(self) -> set[str]:
        """Severities of the alerts."""
        return {item["labels"].get("severity", "") for item in self.alerts}


def parse_notification(body: bytes) -> Notification:
    """Alertmanager's webhook JSON as a `Notification`. Raises `ValueError` for anything else."""
    try:
        value = json.loads(body)
        alerts = tuple(value["alerts"])
        for item in alerts:
            if not _is_alert(item):
                raise ValueError("an alert without name or status, or with labels that are no text")
        return Notification(receiver=str(value["receiver"]), status=str(value["status"]), alerts=alerts, body=value)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not an Alertmanager notification: {error}") from error


def _is_alert(item: Any) -> bool:
    labels = item["labels"]
    return (
        isinstance(item["status"], str)
        and isinstance(labels, dict)
        and all(isinstance(value, str) for value in labels.values())
        and bool(labels["alertname"])
    )


class WebhookReceiver:
    """Collects notifications on `url`. Start with `start`, end with `stop`; both block only briefly."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._notifications: deque[Notification] = deque(maxlen=NOTIFICATIONS_MAX)
        self._num_received = 0
        limits = http_server.ServerLimits(max_requests=MAX_REQUESTS, deadline_s=REQUEST_TIMEOUT_S)
        self._server = http_server.BoundedServer(("127.0.0.1", 0), _handler_for(self), limits)
        self._thread = http_server.ServerThread(self._server, "webhook-receiver")

    @property
    def url(self) -> str:
        """Address to give to Alertmanager."""
        return f"{self._server.base_url}/"

    @property
    def num_dropped(self) -> int:
        """Notifications that fell out of the bounded store."""
        with self._changed:
            return self._num_received - len(self._notifications)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the port and end the thread."""
        self._thread.close()

    def notifications(self) -> list[Notification]:
        """What has arrived so far, oldest first."""
        with self._changed:
            return list(self._notifications)

    def wait_for(self, predicate: Callable[[list[Notification]], bool], timeout_s: float) -> bool:
        """Block until `predicate(notifications)` holds; False if it does not within `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: predicate(list(self._notifications)), timeout=timeout_s)

    def accept(self, body: bytes) -> bool:
        """Keep one request body; False if it is not a notification."""
        try:
            notification = parse_notification(body)
        except ValueError:
            return False
        with self._changed:
            self._num_received += 1
            self._notifications.append(notification)
            self._changed.notify_all()
        return True


def _handler_for(receiver: WebhookReceiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name is http.server's
            length = http_server.body_bytes(self.headers) or 0
            if not 0 < length <= BODY_BYTES_MAX:
                self.send_error(413)
                return
            accepted = receiver.accept(self.rfile.read(length))
            self.send_response(200 if accepted else 400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Silent: the caller shows notifications, not requests."""

    return Handler
