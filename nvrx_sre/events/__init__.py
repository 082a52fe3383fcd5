"""The one stream of events: closed schema, journal, rank channel."""
