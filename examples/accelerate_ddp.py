#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Accelerate (pip install accelerate) with its gradients through the switch.

With a switch and a controller running (`p4reduce-switch`, `p4reduce-controller serve`):

    P4REDUCE_CONTROLLER=127.0.0.1:50051 torchrun --nproc-per-node 2 examples/accelerate_ddp.py

Accelerate's own DistributedDataParallelKwargs(comm_hook=...) knows torch's hooks alone, so ours is registered on the
model that prepare() returns.
"""

import torch
from accelerate import Accelerator

from p4reduce.ddp import P4ReduceState, allreduce_hook


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.utils.data.DataLoader(torch.randn(50 * 32 * 2, 20), batch_size=32)  # type: ignore[arg-type]
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    with P4ReduceState.from_env() as state:
        model.register_comm_hook(state, allreduce_hook)
        for step, x in enumerate(data):
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            if accelerator.is_main_process and step % 10 == 9:
                print(f"step {step + 1}: loss {loss.item():.3f}")
        stats = state.stats()
        print(
            f"rank {accelerator.process_index}: {stats['buckets_switch']} buckets through the switch, "
            f"{stats['buckets_ring']} through the ring"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
