"""torchrun's flags for several nodes, as this launcher understands them.

    --nnodes N | MIN:MAX   --node-rank I   --rdzv-endpoint HOST[:PORT] | --master-addr HOST [--master-port PORT]

Node 0 leads, and listens at the endpoint's port; the others find it by the endpoint's name. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvrx_sre.core.errors import UsageError
from nvrx_sre.launcher.config import DEFAULT_LEADER_PORT, NodesConfig

TOKEN_NAME = "link.token"
"""File in the run directory that holds the secret of the run's launchers."""


def nodes_from(flags: Mapping[str, Any], token_file: Path | None, run_dir: Path) -> NodesConfig | None:
    """What the flags ask for, None for one node. Raises `UsageError` if they do not fit together."""
    min_nodes, num_nodes = _num_nodes(flags.get("nnodes"))
    if num_nodes == 1:
        _check_only_node(flags)
        return None
    if flags.get("standalone"):
        raise UsageError(f"--standalone and --nnodes {num_nodes}: use one of them")
    host, port = _endpoint(flags)
    if flags.get("node_rank") is None:
        raise UsageError(
            f"--nnodes {num_nodes} needs --node-rank: 0 on the node that leads, 1 to {num_nodes - 1} beside"
        )
    return NodesConfig(
        num_nodes=num_nodes,
        min_nodes=min_nodes,
        node_rank=_number("--node-rank", flags["node_rank"]),
        leader_host=host,
        leader_port=port,
        token_file=(run_dir / TOKEN_NAME if token_file is None else token_file).absolute(),
    )


def notices_for_one_node(flags: Mapping[str, Any]) -> list[str]:
    """A line for each flag that means something only between nodes."""
    given = [name for name in ("rdzv_endpoint", "master_addr", "master_port") if flags.get(name)]
    return [f"--{name.replace('_', '-')}: has no effect on one node: its store is on loopback" for name in given]


def _num_nodes(text: str | None) -> tuple[int, int]:
    """(fewest, all) of `N` or `MIN:MAX`."""
    if text is None:
        return 1, 1
    fewest, colon, most = str(text).partition(":")
    low = _number("--nnodes", fewest)
    high = _number("--nnodes", most) if colon else low
    if not 1 <= low <= high:
        raise UsageError(f"--nnodes {text}: use N, or MIN:MAX with 1 <= MIN <= MAX")
    return low, high


def _check_only_node(flags: Mapping[str, Any]) -> None:
    rank = flags.get("node_rank")
    if rank is not None and _number("--node-rank", rank) != 0:
        raise UsageError(f"--node-rank {rank} with one node: give their number by --nnodes")


def _endpoint(flags: Mapping[str, Any]) -> tuple[str, int]:
    endpoint = flags.get("rdzv_endpoint") or ""
    if endpoint:
        host, colon, port = endpoint.rpartition(":")
        if not colon or endpoint.endswith("]"):
            host, port = endpoint, ""
        return host.strip("[]"), _number("--rdzv-endpoint", port) if port else DEFAULT_LEADER_PORT
    host = flags.get("master_addr") or ""
    if not host:
        raise UsageError("--nnodes needs --rdzv-endpoint HOST:PORT: where the other nodes reach node 0")
    port = flags.get("master_port")
    return host, _number("--master-port", port) if port else DEFAULT_LEADER_PORT


def _number(name: str, text: Any) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} {text!r} is not a number") from None
