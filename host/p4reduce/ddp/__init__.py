# SPDX-License-Identifier: Apache-2.0
"""The torch DistributedDataParallel communication hook. The only place, with the demo, that imports torch.

ddp.register_comm_hook(P4ReduceState.from_env(), allreduce_hook)
"""

from __future__ import annotations

try:
    import torch.distributed as _distributed
except ModuleNotFoundError as error:
    if error.name not in ("torch", "torch.distributed"):
        raise
    raise ModuleNotFoundError("p4reduce.ddp needs torch: pip install 'p4reduce[torch]'", name="torch") from None
if not _distributed.is_available():
    raise ImportError("this build of torch has no torch.distributed, which DistributedDataParallel needs")

from p4reduce.ddp.deferred import DeferredState
from p4reduce.ddp.hook import allreduce_hook, noop_hook
from p4reduce.ddp.state import P4ReduceState

__all__ = ["DeferredState", "P4ReduceState", "allreduce_hook", "noop_hook"]
