"""What torch's flight recorder knows of the collectives of this process, as one bounded line of JSON.

Two parts with very different prices. The counters of each group (collectives enqueued and completed: they tell who is
behind) take microseconds and are always taken. The entries (which collective, of what size, called when) take 1 ms for
128 of them; they are taken where a collective is what the fault is about.

torch 2.13 records gloo as well as NCCL, each in a recorder of its own; older releases only NCCL. A recorder that is
not there, or is switched off with `TORCH_FR_BUFFER_SIZE=0`, leaves nothing. Must not: raise, load torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

MAX_ENTRIES = 64
"""Newest entries that are kept: each takes about 250 bytes, and the counters say how many there were."""
MAX_GROUPS = 16
"""Newest groups whose counters are kept: torch forgets none of the generations before."""
MAX_BYTES = 32 * 1024
"""Half of the memory that the stacks share with the trace."""
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Names of torch 2.11 to 2.13."""
_ENTRY_FIELDS = (
    *("record_id", "process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "profiling_name", "state", "retired"),
    *("input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "time_created_ns", "timeout_ms"),
    *("time_discovered_started_ns", "time_discovered_completed_ns"),
)
Dump = Callable[[bool, bool], bytes]
"""(with entries, only active ones) -> JSON."""


def take(*, with_entries: bool) -> bytes:
    """The trace, b'' if there is none."""
    for dump in _recorders():
        try:
            trace = bounded(json.loads(dump(with_entries, False)))
        except (RuntimeError, TypeError, ValueError):
            continue
        if b'"last_enqueued_collective"' in trace and len(trace) <= MAX_BYTES:
            return trace
    return b""


def bounded(trace: dict[str, Any]) -> bytes:
    """The newest groups and entries, as many as there is room for, with the fields that are read."""
    groups = dict(sorted(trace.get("pg_status", {}).items(), key=lambda item: int(item[0]))[-MAX_GROUPS:])
    entries = [{name: entry[name] for name in _ENTRY_FIELDS if name in entry} for entry in trace.get("entries", [])]
    kept = entries[-MAX_ENTRIES:]
    while True:
        shown = {"pg_status": groups, "num_recorded": len(entries), "entries": kept}
        text = json.dumps(shown, separators=(",", ":")).encode()
        if len(text) <= MAX_BYTES or not kept:
            return text
        kept = kept[(len(kept) + 1) // 2 :]


def _recorders() -> list[Dump]:
    module = sys.modules.get("torch._C._distributed_c10d")
    return [getattr(module, name) for name in _DUMPS if hasattr(module, name)]
