"""Failure case C63: the first fault of a kind is an increase of 1, because its series was there at 0 before it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from nvrx_sre.monitoring.promtool import find_promtool
from nvrx_sre.telemetry import catalog


def test_c63_the_first_fault_is_an_increase_of_one(tmp_path: Path) -> None:
    """Prometheus sees 1 for a series that starts at 0, as ours do, and 0 for one that is born with its first event."""
    name = catalog.FAULTS.name
    groups = [
        {
            "interval": "15s",
            "input_series": [
                {"series": f'{name}{{run="ours",fault="hang"}}', "values": "0x40 1x80"},
                {"series": f'{name}{{run="born",fault="hang"}}', "values": "_x40 1x80"},
            ],
            "promql_expr_test": [
                {
                    "expr": f"increase({name}[10m])",
                    "eval_time": "20m",
                    "exp_samples": [
                        {"labels": '{run="born",fault="hang"}', "value": 0},
                        {"labels": '{run="ours",fault="hang"}', "value": 1},
                    ],
                }
            ],
        }
    ]
    path = tmp_path / "first_event.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "15s", "tests": groups}))
    result = subprocess.run([find_promtool(), "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
