"""Planned faults: specification and injection."""
