# SPDX-License-Identifier: Apache-2.0
"""The progress stream: a worker's heartbeat towards the controller, and the controller's directives back.

The stream is not needed to reduce: when it breaks, one warning is logged, reducing goes on, and the stream is opened
again with growing pauses.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from p4reduce.controller_client import ControllerClient
from p4reduce.errors import ControllerError
from p4reduce.proto import controller_pb2 as pb

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


class ProgressStream:
    """Keeps one stream open from `start` to `stop`, in a thread of its own."""

    def __init__(
        self,
        client: ControllerClient,
        identity: tuple[str, int, int],
        snapshot: Callable[[], tuple[int, int]],
        on_directive: Callable[[pb.Directive], None],
        interval: float,
    ) -> None:
        """`identity`: job, epoch, rank. `snapshot`: buckets submitted and completed. `interval`: seconds between
        reports. `on_directive` is called in the stream's thread with every fence and every peer that left.
        """
        self._client = client
        self._identity = identity
        self._snapshot = snapshot
        self._on_directive = on_directive
        self._interval = interval
        self._condition = threading.Condition()
        self._trouble: pb.Trouble | None = None
        self._news = False
        self._registered = False
        self._over = False
        self._leaving = False
        self._call: Any = None
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"p4reduce-progress-{identity[2]}", daemon=True)

    def start(self) -> None:
        """Open the stream."""
        self._thread.start()

    @property
    def registered(self) -> bool:
        """Whether the controller knows of this stream right now."""
        return self._registered

    def wait_registered(self, timeout: float) -> bool:
        """Wait until the controller knows of this stream; False when it does not in time."""
        with self._condition:
            self._condition.wait_for(lambda: self._registered or self._over, timeout)
            return self._registered

    def report(self, trouble: pb.Trouble | None = None) -> None:
        """Send a report at once, not only when the next is due. The first trouble is repeated in all later reports."""
        with self._condition:
            self._trouble = self._trouble or trouble
            self._news = True
            self._condition.notify_all()

    def expect_end(self) -> None:
        """From now on the controller may end the stream: it is not opened again. Reports go on until `stop`."""
        with self._condition:
            self._leaving = True

    def stop(self, timeout: float = 2.0) -> None:
        """End the stream and its thread. Safe to call twice."""
        with self._condition:
            self._over = True
            call = self._call
            self._condition.notify_all()
        if call is not None:
            call.cancel()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._is_over():
            ended = threading.Event()
            try:
                self._follow(ended)
            except grpc.RpcError as error:
                reason = self._client.explain(error)
            except ValueError as error:  # gRPC's answer to a call on a channel that is being closed
                reason = ControllerError(str(error))
            else:
                reason = ControllerError("the controller ended the stream")
            ended.set()
            with self._condition:
                if self._registered:
                    pause = _FIRST_PAUSE_SECONDS
                self._registered = False
                self._condition.notify_all()  # lets the report generator see `ended`
                if self._is_over() or self._leaving:
                    break
                if not self._warned:
                    self._warned = True
                    _LOG.warning("progress stream lost, reducing goes on without the controller: %s", reason)
                self._condition.wait_for(self._is_over, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _is_over(self) -> bool:
        return self._over

    def _follow(self, ended: threading.Event) -> None:
        """Open a stream and handle its directives until it ends."""
        call = self._client.progress(self._reports(ended))
        with self._condition:
            self._call = call
            if self._over:
                call.cancel()
        for directive in call:
            kind = directive.WhichOneof("kind")
            if kind == "registered":
                with self._condition:
                    self._registered = True
                    self._condition.notify_all()
                if self._warned:
                    self._warned = False
                    _LOG.warning("progress stream is back")
            elif kind is not None:
                self._on_directive(directive)
                if kind == "fence":
                    self._over = True
                    call.cancel()

    def _reports(self, ended: threading.Event) -> Iterator[pb.ProgressReport]:
        """Reports at every interval and whenever there is news. Runs in a thread of gRPC's."""
        job, epoch, rank = self._identity
        while not ended.is_set() and not self._over:
            with self._condition:
                self._news = False
                trouble = self._trouble
            submitted, completed = self._snapshot()
            yield pb.ProgressReport(
                job=job, epoch=epoch, rank=rank, submitted=submitted, completed=completed, trouble=trouble
            )
            with self._condition:
                self._condition.wait_for(lambda: self._news or self._over or ended.is_set(), self._interval)
