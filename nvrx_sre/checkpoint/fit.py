"""Does a stored state fit the tracked objects? Asked before a load, answered without changing anything.

Strict both ways: what the script tracks must be stored with the same name, shape and dtype, and what is stored
must be tracked. A silent half-load is how runs go wrong without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nvrx_sre.checkpoint import encoding
from nvrx_sre.checkpoint import tracked as tracking
from nvrx_sre.checkpoint.dcp_metadata import StoredTensor
from nvrx_sre.checkpoint.tracked import Source


class Mismatch(Exception):
    """Stored and tracked state differ; the message names the first difference. Internal to this package."""


def check_fit(
    tracked: Mapping[str, object],
    sources: Sequence[Source],
    stored: Mapping[str, StoredTensor],
    state: Mapping[str, Any],
) -> None:
    """Raise `Mismatch` unless a load of `stored` and `state` into `tracked` would be complete and exact.

    `sources`: the fixed ones of `tracked`, for which `check_tensors` has passed.
    """
    known = {source.fqn for source in sources}
    _check_names("optimizers", (name for name, _ in tracking.optimizers(tracked)), state)
    _check_names("objects", (name for name, _ in tracking.objects(tracked)), state)
    _check_names("values", (name for name, _ in tracking.values(tracked)), state)
    _check_extra(tracked, state["extra"])
    accounted = known | set(encoding.big_names(state))
    accounted |= _check_optimizers(tracked, stored, state["optimizers"])
    tied = {alias for source in sources for alias in source.aliases}
    for key in stored:
        if key not in accounted and key not in tied:
            raise Mismatch(f"it holds {key}, which is not tracked here")
    for key in accounted:
        if key not in stored:
            raise Mismatch(f"it refers to {key} and does not hold it")


def check_tensors(sources: Iterable[Source], stored: Mapping[str, StoredTensor]) -> None:
    """Raise `Mismatch` unless each of these is stored with its dtype and shape."""
    for source in sources:
        key, tensor = source.fqn, source.tensor
        if key not in stored:
            raise Mismatch(f"it holds no {key}")
        form = StoredTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if stored[key] != form:
            raise Mismatch(f"{key} is {_describe(stored[key])} in it and {_describe(form)} here")


def _check_names(kind: str, here: Iterable[str], state: Mapping[str, Any]) -> None:
    names, saved = set(here), set(state[kind])
    for name in sorted(names - saved):
        raise Mismatch(f"{name!r} is tracked here and was not when it was saved")
    for name in sorted(saved - names):
        raise Mismatch(f"{name!r} was tracked when it was saved and is not here")


def _check_extra(tracked: Mapping[str, object], state: Mapping[str, Any]) -> None:
    for name, module in tracking.modules(tracked):
        here, saved = {path for path, _ in tracking.extra_states(module)}, set(state.get(name, ()))
        for path in sorted(here ^ saved):
            where = "here and was not saved" if path in here else "in it and not here"
            raise Mismatch(f"extra state of {name}.{path} is {where}")


def _check_optimizers(
    tracked: Mapping[str, object], stored: Mapping[str, StoredTensor], state: Mapping[str, Any]
) -> set[str]:
    """Keys of optimizer state, after the groups were compared."""
    names = tracking.parameter_names(tracked)
    keys: set[str] = set()
    for name, optimizer in tracking.optimizers(tracked):
        groups = tracking.group_names(name, optimizer, names)
        if groups != [group["names"] for group in state[name]["groups"]]:
            raise Mismatch(f"optimizer {name!r} has other parameter groups")
        parameters = {parameter for group in groups for parameter in group}
        prefix = f"{name}.state."
        for key in stored:
            if key.startswith(prefix) and tracking.split_state_key(key.removeprefix(prefix), parameters):
                keys.add(key)
    return keys


def _describe(tensor: StoredTensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"
