"""torchrun's flags for several nodes: what they mean here, and what does not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nvrx_sre.cli import launch
from nvrx_sre.cli.nodes import nodes_from, notices_for_one_node
from nvrx_sre.core.errors import UsageError, UserError
from nvrx_sre.core.limits import NodeLimits

RUN_DIR = Path("/shared/run")
TWO = {"nnodes": "2", "node_rank": "1", "rdzv_endpoint": "head:29501"}


def test_what_torchrun_would_be_told() -> None:
    """Number, rank and endpoint; the secret lies in the run directory unless another file is named."""
    nodes = nodes_from(TWO, None, RUN_DIR)
    assert nodes is not None
    assert (nodes.num_nodes, nodes.min_nodes, nodes.node_rank) == (2, 2, 1)
    assert (nodes.leader_host, nodes.leader_port) == ("head", 29501)
    assert nodes.token_file == RUN_DIR / "link.token"
    other = nodes_from(TWO, Path("/secret/token"), RUN_DIR)
    assert other is not None and other.token_file == Path("/secret/token")


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ({"rdzv_endpoint": "head"}, ("head", 29_400)),
        ({"rdzv_endpoint": "[fd00::1]:7"}, ("fd00::1", 7)),
        ({"rdzv_endpoint": "[fd00::1]"}, ("fd00::1", 29_400)),
        ({"rdzv_endpoint": "", "master_addr": "10.0.0.1"}, ("10.0.0.1", 29_400)),
        ({"rdzv_endpoint": None, "master_addr": "h", "master_port": "5"}, ("h", 5)),
        ({"master_addr": "other", "master_port": "5"}, ("head", 29_501)),
    ],
)
def test_endpoints(flags: dict[str, Any], where: tuple[str, int]) -> None:
    """Host and port, a host alone, an address of IPv6, torchrun's older pair; the endpoint beats the pair."""
    nodes = nodes_from(TWO | flags, None, RUN_DIR)
    assert nodes is not None
    assert (nodes.leader_host, nodes.leader_port) == where


@pytest.mark.parametrize("nnodes", [None, "1", "1:1"])
def test_one_node_is_one_node(nnodes: str | None) -> None:
    """Rank 0 may be spelled out; what means nothing there is announced."""
    assert nodes_from({"nnodes": nnodes, "node_rank": "0"}, None, RUN_DIR) is None
    assert notices_for_one_node({"rdzv_endpoint": "h:1", "master_addr": None}) == [
        "--rdzv-endpoint: has no effect on one node: its store is on loopback"
    ]
    with pytest.raises(UsageError, match="--node-rank 1 with one node"):
        nodes_from({"nnodes": nnodes, "node_rank": "1"}, None, RUN_DIR)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"nnodes": "many"}, "'many' is not a number"),
        ({"nnodes": "3:2"}, "use N, or MIN:MAX"),
        ({"nnodes": "0:2"}, "use N, or MIN:MAX"),
        ({"node_rank": None}, "--nnodes 2 needs --node-rank"),
        ({"node_rank": "x"}, "--node-rank 'x' is not a number"),
        ({"node_rank": "2"}, "--node-rank is 2: use 0 to 1"),
        ({"rdzv_endpoint": None}, "needs --rdzv-endpoint HOST:PORT"),
        ({"rdzv_endpoint": "h:x"}, "--rdzv-endpoint 'x' is not a number"),
        ({"rdzv_endpoint": "h:70000"}, "port is 70000"),
        ({"standalone": True}, "--standalone and --nnodes 2"),
    ],
)
def test_what_does_not_fit_is_refused(flags: dict[str, Any], message: str) -> None:
    """One line that names the flag."""
    with pytest.raises(UserError, match=message):
        nodes_from(TWO | flags, None, RUN_DIR)


def test_fewest_nodes_are_the_smallest_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--nnodes MIN:MAX` in ranks, unless `--min-world-size` says otherwise; the world counts all nodes."""
    script = tmp_path / "train.py"
    script.touch()
    seen: list[Any] = []
    monkeypatch.setattr(launch, "run_and_report", lambda config, **_: seen.append(config) or 0)
    base = ["--run-dir", str(tmp_path / "r"), "--nproc-per-node", "2", "--nnodes", "2:3", "--node-rank", "1"]
    base += ["--rdzv-endpoint", "h:1"]
    for more in ([], ["--min-world-size", "6"]):
        result = CliRunner().invoke(launch.command, [*base, *more, str(script)], standalone_mode=False)
        assert result.exception is None, result.exception
    assert [(config.world_size, config.min_world_size) for config in seen] == [(6, 4), (6, 6)]
    differing = {
        name for name in seen[0].shared_settings() if seen[0].shared_settings()[name] != seen[1].shared_settings()[name]
    }
    assert differing == {"--min-world-size"}


def test_nodes_with_other_arguments_differ_and_no_argument_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A learning rate that one node has and the other has not is noticed; a password among them stays here."""
    script = tmp_path / "train.py"
    script.touch()
    seen: list[Any] = []
    monkeypatch.setattr(launch, "run_and_report", lambda config, **_: seen.append(config) or 0)
    base = ["--run-dir", str(tmp_path / "r"), "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "h:1"]
    for more in (["--lr", "1", "--password", "s3cr3t"], ["--lr", "2", "--password", "s3cr3t"]):
        CliRunner().invoke(launch.command, [*base, str(script), *more], standalone_mode=False)
    first, second = (config.shared_settings() for config in seen)
    assert {name for name in first if first[name] != second[name]} == {"arguments"}
    assert "s3cr3t" not in str(first)


def test_a_lease_shorter_than_two_beats_is_refused() -> None:
    """Launchers speak every second: a shorter lease would lose healthy nodes."""
    assert NodeLimits(lease_s=2).lease_s == 2
    with pytest.raises(UserError, match=r"lease_s is 1\.5: use 2 seconds or more"):
        NodeLimits(lease_s=1.5)
    with pytest.raises(UserError, match="grace_s is -1: use 0 or more"):
        NodeLimits(grace_s=-1)
