# SPDX-License-Identifier: Apache-2.0
"""A transport whose faults are switched on and off while frames flow."""

from __future__ import annotations

from p4reduce.core.batch import ReceiveBatch, SendBatch
from p4reduce.transport.base import Transport
from p4reduce.transport.faults import FaultRates, FaultyTransport, _Faults

CLEAR = FaultRates()
CUT = FaultRates(loss=1.0)


class SwitchableTransport(FaultyTransport):
    """Passes batches on untouched until `set_rates` says otherwise. `faults` counts, as in FaultyTransport."""

    def __init__(self, inner: Transport, seed: int) -> None:
        super().__init__(inner, CLEAR, seed)
        self._seed = seed
        self._active = False

    def set_rates(self, rates: FaultRates) -> None:
        """From now on. May be called from any thread; frames held back for reordering are lost then."""
        self._outgoing = _Faults(rates, f"{self._seed} out", self.faults)
        self._incoming = _Faults(rates, f"{self._seed} in", self.faults)
        self._active = bool(rates)

    def receive(self, batch: ReceiveBatch) -> int:
        """As the inner transport, but for the faults."""
        if self._active or self._arrived:
            return super().receive(batch)
        return self.inner.receive(batch)

    def send(self, batch: SendBatch) -> int:
        """As the inner transport, but for the faults."""
        return super().send(batch) if self._active else self.inner.send(batch)
