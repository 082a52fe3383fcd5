"""torch.compile between generations: nothing that was compiled for the old one is used by the next.

Compiled code is guarded by the modules, parameters and groups of its generation; kept, it would be traced again
beside the old until dynamo's recompile limit turns a run that restarts often into an eager one, without a word.
What inductor made lies in its cache on disk (`TORCHINDUCTOR_CACHE_DIR`), which all ranks and standbys of a node
share, so that the next generation finds it there.

The private names are those of torch 2.13; where the counter is missing, every generation is reset. Main thread only,
after the training function has left.
"""

from __future__ import annotations

import sys

import torch


def reset() -> None:
    """Forget compiled code and stop the workers that compile; nothing happens in a process that never compiled.

    Blocks until a compile that the interrupt cut short has let go of inductor's subprocess, if it uses one.
    """
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None or not getattr(frames, "FRAME_COUNTER", 1):
        return  # with CUDA the reset imports all of inductor, seconds in the first recovery
    torch.compiler.reset()
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is None:
        return
    inductor.shutdown_compile_workers()
    threads = inductor.AsyncCompile.pool
    if threads.cache_info().currsize:
        threads().shutdown(wait=False, cancel_futures=True)
        threads.cache_clear()
