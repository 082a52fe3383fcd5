"""The rank-side public API of a training script: `resilient` and `Context`.

Importing it does not load torch; calling a decorated function does.
"""

from __future__ import annotations

from nvrx_sre.session.context import Context
from nvrx_sre.session.entry import resilient

__all__ = ["Context", "resilient"]
