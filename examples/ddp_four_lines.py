#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The four lines that send the gradients of your own DistributedDataParallel training through the switch.

With a switch and a controller running (`p4reduce-switch`, `p4reduce-controller serve`):

    P4REDUCE_CONTROLLER=127.0.0.1:50051 torchrun --nproc-per-node 2 examples/ddp_four_lines.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from p4reduce.ddp import P4ReduceState, allreduce_hook  # line 1


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
    )
    state = P4ReduceState.from_env()  # line 2
    model.register_comm_hook(state, allreduce_hook)  # line 3

    # From here on your training is as it was.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for step in range(50):
        x = torch.randn(32, 20, generator=data)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    stats = state.stats()
    print(
        f"rank {rank}: {stats['buckets_switch']} buckets through the switch, {stats['buckets_ring']} through the ring"
    )
    state.close()  # line 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
