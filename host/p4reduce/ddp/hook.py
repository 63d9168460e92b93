# SPDX-License-Identifier: Apache-2.0
"""The functions to give to `DistributedDataParallel.register_comm_hook`.

DDP compares the annotations of a hook with the real types and looks for a parameter named `bucket`; both are therefore
written out here, and this module must not postpone the evaluation of annotations.
"""

import torch
from torch._C._distributed_c10d import GradBucket

from p4reduce.ddp.deferred import DeferredState
from p4reduce.ddp.state import P4ReduceState


def allreduce_hook(state: P4ReduceState | DeferredState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replace the gradients in `bucket` by their mean over all ranks, summed by the switch where it can.

    A reduction that fails does not raise here, because an exception inside backward() leaves DDP unusable. The bucket
    comes back filled with NaN, so that nobody trains on gradients that were not reduced, and the error is raised by
    the next `optimizer.step()`, by `state.check()`, or by the first hook call of the next backward pass. (A GradScaler
    skips `optimizer.step()` when it sees NaN: there the error shows one step later.)
    """
    return state.reduce(bucket)


def noop_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG001 (DDP's signature)
    """Leave the local gradients as they are: shows how fast training would be if communication were free.

    The ranks drift apart, so it is for measuring only. `state` is ignored and may be None.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
