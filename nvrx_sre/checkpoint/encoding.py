"""Small state as JSON: what `state_dict()` of schedulers, loaders and user objects returns, and back.

JSON scalars, lists and dicts with text keys are themselves. Everything else is an object with one key that
begins with `$`: tuple, bytes, items (a dict with other keys), counter, float (bits that JSON lacks), tensor,
ndarray, big. Tensors from `BIG_BYTES` on do not go into the text: the caller's `big` takes them by name.
Nothing is pickled, so decoding runs no code of the input's choosing.

Must not: accept what it cannot give back equal; such a value is a `UserError` that names it.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from nvrx_sre.core.errors import UserError

BIG_BYTES = 4096
"""Tensors of at least this size go to the data area: base64 of more would cost the step more than it saves."""

BigTensors = Callable[[str, torch.Tensor], None]


def encode(value: Any, name: str, big: BigTensors) -> Any:
    """JSON-ready form of `value`, called `name` in messages and as prefix of big tensors' names."""
    if isinstance(value, np.ndarray | np.generic):  # first: numpy.float64 is a float
        return _encode_array(np.asarray(value), isinstance(value, np.generic), name)
    if value is None or isinstance(value, bool | int | str):
        return value if type(value) in (bool, int, str, type(None)) else _plain(value, name)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, name, big)
    if isinstance(value, bytes | bytearray):
        return {"$bytes": _text(bytes(value))}
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{name}.{index}", big) for index, item in enumerate(value)]}
    if isinstance(value, list):
        return [encode(item, f"{name}.{index}", big) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, name, big)
    raise UserError(
        f"state {name!r} is a {type(value).__name__}, which cannot be saved: use numbers, text, lists, dicts, "
        "tensors or arrays in state_dict()"
    )


def decode(value: Any, big: Callable[[str], torch.Tensor]) -> Any:
    """Inverse of `encode`; `big` returns the tensor that was handed out under a name."""
    if isinstance(value, list):
        return [decode(item, big) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, body = next(iter(value.items()))
        decoder = _DECODERS.get(tag)
        if decoder is not None:
            return decoder(body, big)
    return {key: decode(item, big) for key, item in value.items()}


def big_names(value: Any) -> list[str]:
    """Names of all big tensors that an encoded value refers to."""
    if isinstance(value, list):
        return [name for item in value for name in big_names(item)]
    if not isinstance(value, dict):
        return []
    if set(value) == {"$big"}:
        return [value["$big"]]
    return [name for item in value.values() for name in big_names(item)]


def _plain(value: Any, name: str) -> Any:
    """Subclasses of int and str (enums): the text has no room for their type."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise UserError(f"state {name!r} is a {type(value).__name__}, which cannot be saved")


def _encode_tensor(value: torch.Tensor, name: str, big: BigTensors) -> Any:
    if isinstance(value, DTensor):
        raise UserError(f"state {name!r} is a sharded tensor: track its module or optimizer, or the tensor itself")
    if value.numel() * value.element_size() >= BIG_BYTES:
        big(name, value)
        return {"$big": name}
    content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(content)]}


def _encode_array(value: np.ndarray[Any, Any], scalar: bool, name: str) -> Any:
    if value.dtype.hasobject:
        raise UserError(f"state {name!r} is an array of Python objects, which cannot be saved")
    return {"$ndarray": [value.dtype.str, list(value.shape), _text(np.ascontiguousarray(value).tobytes()), scalar]}


def _encode_mapping(value: Mapping[Any, Any], name: str, big: BigTensors) -> Any:
    if isinstance(value, Counter):
        return {"$counter": [[encode(key, name, big), int(count)] for key, count in value.items()]}
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{name}.{key}", big) for key, item in value.items()}
    return {"$items": [[encode(key, name, big), encode(item, f"{name}.{key}", big)] for key, item in value.items()]}


def _decode_tensor(body: Any, _: Any) -> torch.Tensor:
    dtype, shape, content = body
    raw = bytearray(base64.b64decode(content))
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(raw, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape).clone()


def _decode_array(body: Any, _: Any) -> Any:
    dtype, shape, content, scalar = body
    array = np.frombuffer(base64.b64decode(content), dtype=np.dtype(dtype)).reshape(shape).copy()
    return array[()] if scalar else array


_DECODERS: dict[str, Callable[[Any, Callable[[str], torch.Tensor]], Any]] = {
    "$float": lambda body, _: float(body),
    "$bytes": lambda body, _: base64.b64decode(body),
    "$tuple": lambda body, big: tuple(decode(item, big) for item in body),
    "$items": lambda body, big: {decode(key, big): decode(item, big) for key, item in body},
    "$counter": lambda body, big: Counter({decode(key, big): count for key, count in body}),
    "$tensor": _decode_tensor,
    "$ndarray": _decode_array,
    "$big": lambda body, big: big(body),
}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
