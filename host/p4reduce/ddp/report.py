# SPDX-License-Identifier: Apache-2.0
"""What a state has to say: its statistics, and a line for the log every so many steps."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any, cast

from p4reduce.ddp.ledger import Ledger
from p4reduce.ddp.ways import SumsBuckets

logger = logging.getLogger("p4reduce.ddp")

_MIB = 1 << 20


class Reporter:
    """Statistics of one state. It does not refer to the state."""

    def __init__(self, ledger: Ledger, comm: SumsBuckets | None, mode: str, world_size: int, log_every: int) -> None:
        """`log_every`: backward passes between two lines in the log; 0 for none."""
        self._ledger = ledger
        self._comm = comm
        self._fixed = {"mode": mode, "world_size": world_size}
        self._log_every = log_every
        self._last = self._moment() if log_every else {}

    def stats(self) -> dict[str, Any]:
        """See `P4ReduceState.stats`."""
        ledger = self._ledger
        comm = as_dict(self._comm.stats()) if self._comm is not None else {}
        core, seconds = comm.get("core") or {}, comm.get("seconds") or {}
        wire = int(core.get("bytes_sent", 0))
        return {
            **self._fixed,
            "steps": ledger.steps,
            **{f"buckets_{path}": count for path, count in ledger.buckets.items()},
            "buckets_failed": ledger.failed,
            **{f"bytes_{path}": size for path, size in ledger.bytes.items()},
            "bytes_wire": wire,
            "wire_bytes_per_element": wire / ledger.elements if ledger.elements else 0.0,
            "retransmissions": int(core.get("retransmissions", 0)),
            "blocks_not_finite": ledger.blocks_not_finite,
            "overflows": ledger.overflows,
            "submit_seconds": ledger.submit_seconds,
            "reduce_seconds": ledger.reduce_seconds,
            "wait_seconds": ledger.wait_seconds,
            "quantize_seconds": float(seconds.get("encode", 0.0)),
            "wire_seconds": float(seconds.get("wire", 0.0)),
            "dequantize_seconds": float(seconds.get("decode", 0.0)),
            "error": None if ledger.error is None else f"{type(ledger.error).__name__}: {ledger.error}",
            "comm": comm,
        }

    def on_step(self, step: int) -> None:
        """A backward pass is complete. Called in the completing thread, which must survive whatever happens here."""
        if not self._log_every or (step + 1) % self._log_every:
            return
        try:
            logger.info("%s", self._line(step))
        except Exception:
            logger.exception("no statistics after step %d", step)

    def _moment(self) -> dict[str, Any]:
        return {**self.stats(), "time": time.perf_counter()}

    def _line(self, step: int) -> str:
        last, now = self._last, self._moment()
        self._last = now

        def since(key: str) -> Any:
            return now[key] - last[key]

        steps = max(since("steps"), 1)

        def per_step(key: str) -> str:
            return f"{1000 * since(key) / steps:.1f}"

        raw = sum(since(f"bytes_{path}") for path in self._ledger.bytes)
        return (
            f"step {step}: buckets switch {since('buckets_switch')} ring {since('buckets_ring')} "
            f"plain {since('buckets_plain')} failed {since('buckets_failed')}; gradients {raw / _MIB:.1f} MiB, "
            f"wire {since('bytes_wire') / _MIB:.1f} MiB; retransmissions {since('retransmissions')}; "
            f"not finite {since('blocks_not_finite')} blocks; overflows {since('overflows')}; "
            f"ms a step: {per_step('time')}, of which wait {per_step('wait_seconds')}; beside it quantize "
            f"{per_step('quantize_seconds')}, wire {per_step('wire_seconds')}, dequantize "
            f"{per_step('dequantize_seconds')}"
        )


def as_dict(stats: Any) -> dict[str, Any]:
    """Counters of a communicator as a dictionary."""
    if dataclasses.is_dataclass(stats) and not isinstance(stats, type):
        return dataclasses.asdict(stats)
    return dict(cast(Mapping[str, Any], stats))
