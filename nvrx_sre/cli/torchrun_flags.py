"""Every flag of `torchrun` and what `nvrx-sre launch` does with it. Data.

Three treatments, so that no flag is silently lost:
- HONOURED: means here what it means there;
- MAPPED: accepted, the same intent is met another way (said once at start if it was given);
- REFUSED: accepted only with a value that asks for nothing special, else an error that says why.

A test enumerates torchrun's own parser against this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Treatment(StrEnum):
    """What `launch` does with a flag."""

    HONOURED = "honoured"
    MAPPED = "mapped"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class TorchrunFlag:
    """One flag of torchrun."""

    names: tuple[str, ...]
    """Spellings, as torchrun accepts them."""
    treatment: Treatment
    note: str
    """HONOURED and MAPPED: what happens. REFUSED: why not, and what to do instead."""
    takes_value: bool = True
    harmless: tuple[str, ...] = ()
    """REFUSED: values that are accepted, because they are what happens anyway."""

    @property
    def option(self) -> str:
        """The long spelling, with dashes: what messages show."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def parameter(self) -> str:
        """Name of the command's parameter, and of torchrun's `dest`."""
        return self.option.lstrip("-").replace("-", "_")

    @property
    def variable(self) -> str:
        """Environment variable that torchrun reads the flag from."""
        return f"PET_{self.parameter.upper()}"


TORCHRUN_FLAGS: tuple[TorchrunFlag, ...] = (
    TorchrunFlag(
        names=("--nproc-per-node", "--nproc_per_node"),
        treatment=Treatment.HONOURED,
        note="ranks: a number, cpu, gpu or auto",
    ),
    TorchrunFlag(
        names=("-m", "--module"),
        treatment=Treatment.HONOURED,
        note="the script is a module, as for python -m",
        takes_value=False,
    ),
    TorchrunFlag(
        names=("--standalone",),
        treatment=Treatment.HONOURED,
        note="one node with a store of its own, which is what happens anyway",
        takes_value=False,
    ),
    TorchrunFlag(
        names=("--rdzv-id", "--rdzv_id"),
        treatment=Treatment.MAPPED,
        note="becomes the run's name where --name is not given",
    ),
    TorchrunFlag(
        names=("--max-restarts", "--max_restarts"),
        treatment=Treatment.MAPPED,
        note="caps attempts without progress at N + 1; restarts with progress are not limited",
    ),
    TorchrunFlag(
        names=("--shutdown-timeout", "--shutdown_timeout"),
        treatment=Treatment.MAPPED,
        note="becomes the teardown deadline, past which a rank is killed",
    ),
    TorchrunFlag(
        names=("--rdzv-backend", "--rdzv_backend"),
        treatment=Treatment.MAPPED,
        note="has no effect: the launcher hosts the store and gates every rendezvous itself",
    ),
    TorchrunFlag(
        names=("--nnodes",),
        treatment=Treatment.HONOURED,
        note="nodes: a number, or MIN:MAX; node 0 leads",
    ),
    TorchrunFlag(
        names=("--node-rank", "--node_rank"),
        treatment=Treatment.HONOURED,
        note="this node, from 0",
    ),
    TorchrunFlag(
        names=("--rdzv-endpoint", "--rdzv_endpoint"),
        treatment=Treatment.HONOURED,
        note="HOST[:PORT] where the other nodes reach node 0, whose launcher listens at that port (29400)",
    ),
    TorchrunFlag(
        names=("--master-addr", "--master_addr"),
        treatment=Treatment.HONOURED,
        note="the endpoint's host, where no endpoint is given",
    ),
    TorchrunFlag(
        names=("--master-port", "--master_port"),
        treatment=Treatment.HONOURED,
        note="the endpoint's port, where no endpoint is given",
    ),
    TorchrunFlag(
        names=("--rdzv-conf", "--rdzv_conf"),
        treatment=Treatment.MAPPED,
        note="has no effect: deadlines are set in the [deadlines] section of --config",
    ),
    TorchrunFlag(
        names=("--monitor-interval", "--monitor_interval"),
        treatment=Treatment.MAPPED,
        note="has no effect: deaths and errors are noticed when they happen",
    ),
    TorchrunFlag(
        names=("--start-method", "--start_method"),
        treatment=Treatment.MAPPED,
        note="has no effect: workers are forked from a process that has imported torch and nothing of the script",
    ),
    TorchrunFlag(
        names=("--role",),
        treatment=Treatment.MAPPED,
        note="has no effect: there is one role, and records carry the rank",
    ),
    TorchrunFlag(
        names=("--run-path", "--run_path"),
        treatment=Treatment.MAPPED,
        note="has no effect: the script runs as the main module anyway",
        takes_value=False,
    ),
    TorchrunFlag(
        names=("--local-addr", "--local_addr"),
        treatment=Treatment.REFUSED,
        note="ranks meet over the interface by which their launcher reaches the leader's: set GLOO_SOCKET_IFNAME",
        harmless=("127.0.0.1", "localhost", "::1"),
    ),
    TorchrunFlag(
        names=("--no-python", "--no_python"),
        treatment=Treatment.REFUSED,
        note="a rank must be a Python process to be restarted in place",
        takes_value=False,
    ),
    TorchrunFlag(
        names=("--event-log-handler", "--event_log_handler"),
        treatment=Treatment.REFUSED,
        note="events are in the run directory's journal",
        harmless=("null",),
    ),
    TorchrunFlag(
        names=("--log-dir", "--log_dir"),
        treatment=Treatment.REFUSED,
        note="logs lie in the run directory: use --run-dir",
    ),
    TorchrunFlag(
        names=("-r", "--redirects"),
        treatment=Treatment.REFUSED,
        note="the ranks' output always goes to files under the run directory's logs",
        harmless=("0", "3"),
    ),
    TorchrunFlag(
        names=("-t", "--tee"),
        treatment=Treatment.REFUSED,
        note="the ranks' output goes to files under the run directory's logs: use tail -f",
        harmless=("0",),
    ),
    TorchrunFlag(
        names=("--local-ranks-filter", "--local_ranks_filter"),
        treatment=Treatment.REFUSED,
        note="the ranks' output goes to one file a rank and attempt: choose among the files",
        harmless=("",),
    ),
    TorchrunFlag(
        names=("--duplicate-stdout-filters", "--duplicate_stdout_filters"),
        treatment=Treatment.REFUSED,
        note="the ranks' output goes to one file a rank and attempt: use grep",
        harmless=("",),
    ),
    TorchrunFlag(
        names=("--duplicate-stderr-filters", "--duplicate_stderr_filters"),
        treatment=Treatment.REFUSED,
        note="the ranks' output goes to one file a rank and attempt: use grep",
        harmless=("",),
    ),
    TorchrunFlag(
        names=("--logs-specs", "--logs_specs"),
        treatment=Treatment.REFUSED,
        note="the layout of the logs is fixed",
        harmless=("default",),
    ),
    TorchrunFlag(
        names=("--numa-binding", "--numa_binding"),
        treatment=Treatment.REFUSED,
        note="bind the launcher instead (numactl): the ranks inherit it",
    ),
    TorchrunFlag(
        names=("--signals-to-handle", "--signals_to_handle"),
        treatment=Treatment.REFUSED,
        note="SIGTERM is a preemption, SIGINT a person",
        harmless=("SIGTERM,SIGINT,SIGHUP,SIGQUIT",),
    ),
    TorchrunFlag(
        names=("--virtual-local-rank", "--virtual_local_rank"),
        treatment=Treatment.REFUSED,
        note="LOCAL_RANK is the real local rank",
        takes_value=False,
    ),
)
