"""Dashboards, alert rules and runbooks: generated from the metric catalog, tested against the real programs.

`generate` writes them, `lint` and `promtool` check them, `stack` runs them on loopback, `assets` finds them in a
checkout or a wheel. Must not: import anything of the package but core and the catalog, or be needed to train.
"""
