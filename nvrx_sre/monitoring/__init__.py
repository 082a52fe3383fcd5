"""Generated dashboards, alert rules and runbooks."""
