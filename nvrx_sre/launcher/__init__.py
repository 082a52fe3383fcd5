"""The long-lived process of a node: owns workers, hot slots, metrics registry and spans."""
