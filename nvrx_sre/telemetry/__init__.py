"""Views of the event stream: metric catalog, Prometheus registry, spans, logs, endpoint."""
