# SPDX-License-Identifier: Apache-2.0
"""The ring path: the same integers, summed by a collective library instead of the switch (docs/design.md, section 5).

`Ring` is what such a library must do, `local_rings` one for ranks in one process, `RingRunner` what sums a job's
buckets on a ring, in order. The ring of torch.distributed is `p4reduce.ddp.ring.TorchRing`: nothing here needs torch.
"""

from __future__ import annotations

from p4reduce.ring.base import Ring
from p4reduce.ring.local import local_rings
from p4reduce.ring.runner import RingCounters, RingRunner

__all__ = ["Ring", "RingCounters", "RingRunner", "local_rings"]
