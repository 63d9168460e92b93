#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lightning (pip install lightning) with its gradients through the switch.

With a switch and a controller running (`p4reduce-switch`, `p4reduce-controller serve`):

    P4REDUCE_CONTROLLER=127.0.0.1:50051 torchrun --nproc-per-node 2 examples/lightning_ddp.py

Lightning's own DDPStrategy(ddp_comm_state=DeferredState(), ddp_comm_hook=allreduce_hook) does the same on CUDA; it
ignores both without saying so when the model is in CPU memory. The callback below works anywhere.
"""

import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from p4reduce.ddp import P4ReduceState, allreduce_hook


class ThroughTheSwitch(Callback):
    """Gives the gradients of a DDP strategy to p4reduce while the trainer fits."""

    state: P4ReduceState | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        self.state = P4ReduceState.from_env()
        model: Any = trainer.strategy.model  # the DistributedDataParallel around `module`
        model.register_comm_hook(self.state, allreduce_hook)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
        if self.state is not None:
            stats = self.state.stats()
            print(
                f"rank {trainer.global_rank}: {stats['buckets_switch']} buckets through the switch, "
                f"{stats['buckets_ring']} through the ring"
            )

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:  # noqa: ARG002
        if self.state is not None:
            self.state.close()


class Sums(LightningModule):
    """Learns to add 20 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.net(x) - x.sum(dim=1, keepdim=True)).square().mean()
        if self.global_rank == 0 and index % 10 == 9:
            print(f"step {index + 1}: loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.randn(50 * 32 * 2, 20), batch_size=32)  # type: ignore[arg-type]
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=1,
        callbacks=[ThroughTheSwitch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sums(), data)


if __name__ == "__main__":
    main()
