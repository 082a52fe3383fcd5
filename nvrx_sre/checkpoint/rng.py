"""Random state of one rank: torch, numpy and Python generators as JSON-ready text, and back.

Each rank has its own streams, so each stores its own; nothing here is shared between ranks. CUDA's
generators are included for the current device once CUDA is in use. Only this module of the package touches
`random` outside core. Thread safety: reads and writes process-wide generators; call from the main thread.
"""

from __future__ import annotations

import array
import base64
import hashlib
import random
from typing import Any

import numpy as np
import torch


def get_state() -> dict[str, Any]:
    """State of all generators, JSON-ready. About 20 kB of text, 65 us, half of it for numpy's."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": state_text(torch.get_rng_state()),
        "python": {"version": version, "words": _text(array.array("I", words).tobytes()), "gauss": _hex(gauss)},
        "numpy": {
            "kind": kind,
            "keys": _text(np.asarray(keys, dtype="<u4").tobytes()),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached).hex(),
        },
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has none
        state["cuda"] = state_text(torch.cuda.get_rng_state())
    return state


def set_state(state: dict[str, Any]) -> None:
    """Inverse of `get_state`. Raises `KeyError` or `ValueError` for anything else."""
    torch.set_rng_state(state_of(state["torch"]))
    python = state["python"]
    words = array.array("I", base64.b64decode(python["words"]))
    gauss = None if python["gauss"] is None else float.fromhex(python["gauss"])
    random.setstate((python["version"], tuple(words), gauss))
    numpy = state["numpy"]
    keys = np.frombuffer(base64.b64decode(numpy["keys"]), dtype="<u4").astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], float.fromhex(numpy["cached"])))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state_of(state["cuda"]))


def set_derived_state(state: dict[str, Any], rank: int) -> None:
    """Seed every generator from `state` and `rank`: for a rank that had no stream of its own before.

    Deterministic, and different for each rank, so that two ranks never draw the same numbers.
    """
    seed_from(f"{state['torch']}/{rank}")


def seed_from(text: str) -> None:
    """Seed every generator from `text`: the same numbers for the same text, unrelated ones for another."""
    digest = hashlib.sha256(text.encode()).digest()
    seed = int.from_bytes(digest[:7], "little")  # below 2**63, which torch accepts
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def state_text(state: torch.Tensor) -> str:
    """State of one of torch's generators as text."""
    return _text(state.numpy().tobytes())


def state_of(text: str) -> torch.Tensor:
    """Inverse of `state_text`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _hex(value: float | None) -> str | None:
    return None if value is None else float(value).hex()
