"""nvrx-sre: a resilient PyTorch trainer and the observability to prove it.

The rank-side API for a training script is `resilient` and `Context`. Importing this package never loads
torch; torch is loaded by the decorated training function's process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvrx_sre.session import Context as Context
    from nvrx_sre.session import resilient as resilient

__version__ = "0.1.0"
__all__ = ["Context", "__version__", "resilient"]


def __getattr__(name: str) -> Any:
    if name in ("Context", "resilient"):
        from nvrx_sre import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
