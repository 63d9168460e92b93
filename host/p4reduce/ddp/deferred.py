# SPDX-License-Identifier: Apache-2.0
"""A state that joins its job at the first bucket, for frameworks that want one before there is a process group."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from p4reduce.ddp.state import P4ReduceState
from p4reduce.errors import UsageError

logger = logging.getLogger("p4reduce.ddp")


class DeferredState:
    """Stands for the `P4ReduceState.from_env(**arguments)` that it makes in the first backward pass.

    For example `DDPStrategy(ddp_comm_state=DeferredState(), ddp_comm_hook=allreduce_hook)` of Lightning. What
    `from_env` raises comes out of that backward pass; where there is a choice, make the state itself before.
    """

    def __init__(self, **arguments: Any) -> None:
        """`arguments`: of `P4ReduceState.from_env`."""
        self._arguments = arguments
        self._state: P4ReduceState | None = None
        self._loaded: dict[str, Any] | None = None
        self._closed = False

    @property
    def state(self) -> P4ReduceState | None:
        """The state itself; None before the first bucket."""
        return self._state

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start reducing a bucket in place. Use `allreduce_hook`."""
        if self._state is None:
            if self._closed:
                raise UsageError("this DeferredState is closed: make a new one")
            self._state = P4ReduceState.from_env(**self._arguments)
            if self._loaded is not None:
                self._state.load_state_dict(self._loaded)
                self._loaded = None
        return self._state.reduce(bucket)

    @property
    def error(self) -> Exception | None:
        """As `P4ReduceState.error`."""
        return None if self._state is None else self._state.error

    def check(self) -> None:
        """As `P4ReduceState.check`."""
        if self._state is not None:
            self._state.check()

    def stats(self) -> dict[str, Any]:
        """As `P4ReduceState.stats`; empty before the first bucket."""
        return {} if self._state is None else self._state.stats()

    def state_dict(self) -> dict[str, Any]:
        """As `P4ReduceState.state_dict`. UsageError before the first bucket, unless something was loaded."""
        if self._state is not None:
            return self._state.state_dict()
        if self._loaded is None:
            raise UsageError("there is nothing to save before the first backward pass")
        return self._loaded

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `P4ReduceState.load_state_dict`, at the first bucket if there was none yet."""
        if self._state is not None:
            self._state.load_state_dict(state)
        else:
            self._loaded = state

    def close(self) -> None:
        """As `P4ReduceState.close`."""
        self._closed = True
        if self._state is not None:
            self._state.close()

    def __enter__(self) -> DeferredState:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._state is not None:
            logger.warning("a saved or copied DeferredState joins a job of its own; for checkpoints use state_dict()")
        return {"_arguments": self._arguments, "_state": None, "_loaded": self._loaded, "_closed": self._closed}
