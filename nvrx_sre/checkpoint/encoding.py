"""Small state as JSON: what `state_dict()` of schedulers, loaders and user objects returns, and back.

JSON scalars, lists and dicts with text keys are themselves. Everything else is an object with one key that
begins with `$`: tuple, bytes, bytearray, items (a dict with other keys), ordered, default, counter, float (bits that
JSON lacks), tensor, ndarray, big, on (a tensor that was not on the CPU). Tensors from `BIG_BYTES` on do not go into the
text: the caller's `big` takes them by name. A tensor of a GPU goes back to the current one, where the process uses any.
Nothing is pickled, so decoding runs no code of the input's choosing.

Must not: accept what it cannot give back equal and of its type; such a value is a `UserError` that names it. Numbers
and text of a type of their own (enums) come back equal, as plain ones, and so do mappings that are no dict.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
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
        return _encode_array(np.asanyarray(value), isinstance(value, np.generic), name)
    if value is None or isinstance(value, bool | int | str):
        return value if type(value) in (bool, int, str, type(None)) else _plain(value, name)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, name, big)
    if isinstance(value, bytes | bytearray):
        return {"$bytearray" if isinstance(value, bytearray) else "$bytes": _text(bytes(value))}
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            raise UserError(f"state {name!r} is a named tuple, whose names cannot be saved: use a dict")
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
    if value.layout is not torch.strided or value.is_quantized:
        raise UserError(f"state {name!r} is a sparse or quantized tensor, which cannot be saved")
    content = _encode_content(value, name, big)
    return content if value.device.type == "cpu" else {"$on": [value.device.type, content]}


def _encode_content(value: torch.Tensor, name: str, big: BigTensors) -> Any:
    if value.numel() * value.element_size() >= BIG_BYTES:
        big(name, value)
        return {"$big": name}
    content = (
        value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )
    return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(content)]}


def _encode_array(value: np.ndarray[Any, Any], scalar: bool, name: str) -> Any:
    if value.dtype.hasobject:
        raise UserError(f"state {name!r} is an array of Python objects, which cannot be saved")
    if type(value) is not np.ndarray or value.dtype.fields is not None:  # masks and fields would be lost
        raise UserError(f"state {name!r} is an array with a mask, fields or a type of its own: use plain arrays")
    return {"$ndarray": [value.dtype.str, list(value.shape), _text(np.ascontiguousarray(value).tobytes()), scalar]}


def _encode_mapping(value: Mapping[Any, Any], name: str, big: BigTensors) -> Any:
    if isinstance(value, Counter):
        return {"$counter": [[encode(key, name, big), int(count)] for key, count in value.items()]}
    if isinstance(value, OrderedDict):
        return {"$ordered": encode(dict(value), name, big)}
    if isinstance(value, defaultdict):
        factory = value.default_factory
        made = next((text for text, known in _FACTORIES.items() if known is factory), None)
        if made is None:
            raise UserError(
                f"state {name!r} is a defaultdict whose default cannot be saved: use one of {', '.join(_FACTORIES)}"
            )
        return {"$default": [made, encode(dict(value), name, big)]}
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{name}.{key}", big) for key, item in value.items()}
    return {"$items": [[encode(key, name, big), encode(item, f"{name}.{key}", big)] for key, item in value.items()]}


def _decode_tensor(body: Any, _: Any) -> torch.Tensor:
    dtype, shape, content = body
    raw = bytearray(base64.b64decode(content))
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(raw, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape).clone()


def _decode_on(body: Any, big: Callable[[str], torch.Tensor]) -> torch.Tensor:
    kind, content = body
    tensor: torch.Tensor = decode(content, big)
    return tensor.to(kind) if _is_in_use(kind) else tensor


def _is_in_use(kind: str) -> bool:
    """A reader of checkpoints must not begin to use a device."""
    return kind == "cuda" and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch has none


def _decode_array(body: Any, _: Any) -> Any:
    dtype, shape, content, scalar = body
    array = np.frombuffer(base64.b64decode(content), dtype=np.dtype(dtype)).reshape(shape).copy()
    return array[()] if scalar else array


_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None,
    **{kind.__name__: kind for kind in (int, float, bool, str, list, dict)},
}
"""What a defaultdict makes, by its name in the text."""

_DECODERS: dict[str, Callable[[Any, Callable[[str], torch.Tensor]], Any]] = {
    "$float": lambda body, _: float(body),
    "$bytes": lambda body, _: base64.b64decode(body),
    "$bytearray": lambda body, _: bytearray(base64.b64decode(body)),
    "$tuple": lambda body, big: tuple(decode(item, big) for item in body),
    "$items": lambda body, big: {decode(key, big): decode(item, big) for key, item in body},
    "$ordered": lambda body, big: OrderedDict(decode(body, big)),
    "$default": lambda body, big: defaultdict(_FACTORIES[body[0]], decode(body[1], big)),
    "$counter": lambda body, big: Counter({decode(key, big): count for key, count in body}),
    "$tensor": _decode_tensor,
    "$ndarray": _decode_array,
    "$big": lambda body, big: big(body),
    "$on": _decode_on,
}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
