# SPDX-License-Identifier: Apache-2.0
"""The progress stream: a worker's heartbeat towards the controller, and the controller's directives back.

The stream is not needed to reduce: when it breaks, one warning is logged, reducing goes on, and the stream is opened
again with growing pauses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from p4reduce.controller_client import ControllerClient
from p4reduce.errors import ControllerError
from p4reduce.proto import controller_pb2 as pb

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0


class ProgressStream:
    """Keeps one stream open from `start` to `stop`, in a thread of its own."""

    def __init__(
        self,
        client: ControllerClient,
        rank: int,
        credential: bytes,
        make_report: Callable[[], pb.ProgressReport],
        on_directive: Callable[[pb.Directive], None],
        interval: float,
    ) -> None:
        """`make_report`: a report about now, without trouble; called from threads of gRPC's. `interval`: seconds
        between reports. `on_directive` is called in the stream's thread with every directive but Registered.
        """
        self._client = client
        self._credential = credential
        self._make_report = make_report
        self._on_directive = on_directive
        self._interval = interval
        # However short the lease: several attempts fit into it.
        self._longest_pause = min(_LONGEST_PAUSE_SECONDS, interval / 2)
        self._condition = threading.Condition()
        self._trouble: pb.Trouble | None = None
        self._news = False
        self._registered_at: float | None = None
        self._over = False
        self._leaving = False
        self._call: Any = None
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=f"p4reduce-progress-{rank}", daemon=True)

    def start(self) -> None:
        """Open the stream."""
        self._thread.start()

    @property
    def registered(self) -> bool:
        """Whether the controller knows of this stream right now."""
        return self._registered_at is not None

    @property
    def registered_seconds(self) -> float | None:
        """For how long the controller has known of this stream without a break; None when it does not."""
        since = self._registered_at
        return None if since is None else time.monotonic() - since

    def wait_registered(self, timeout: float) -> bool:
        """Wait until the controller knows of this stream; False when it does not in time."""
        with self._condition:
            self._condition.wait_for(lambda: self.registered or self._over, timeout)
            return self.registered

    def report(self, trouble: pb.Trouble | None = None) -> None:
        """Send a report at once, not only when the next is due. All later reports repeat the trouble that came first,
        until it is withdrawn."""
        with self._condition:
            self._trouble = self._trouble or trouble
            self._news = True
            self._condition.notify_all()

    def withdraw(self, instead: pb.Trouble | None = None) -> None:
        """The trouble is over, or `instead` has taken its place; a report says so at once."""
        with self._condition:
            self._trouble = instead
            self._news = True
            self._condition.notify_all()

    def wait_over(self, timeout: float) -> bool:
        """Wait until the controller has fenced, as long as it hears us; False when it has not in time."""
        with self._condition:
            self._condition.wait_for(lambda: self._over or not self.registered, timeout)
            return self._over

    def expect_end(self) -> None:
        """From now on the controller may end the stream, which is nothing to warn of. Reports go on until `stop`."""
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
                lost = self.registered
                if lost:
                    pause = _FIRST_PAUSE_SECONDS
                self._registered_at = None
                self._condition.notify_all()  # lets the report generator see `ended`
                if self._is_over():
                    break
                # Where several controllers are named, the first to answer may be one that stands by.
                worth = (lost or pause >= self._longest_pause) and not self._leaving
                if worth and not self._warned:
                    self._warned = True
                    _LOG.warning("progress stream lost, reducing goes on without the controller: %s", reason)
                self._condition.wait_for(self._is_over, pause)
            pause = min(2 * pause, self._longest_pause)

    def _is_over(self) -> bool:
        return self._over

    def _follow(self, ended: threading.Event) -> None:
        """Open a stream and handle its directives until it ends."""
        call = self._client.progress(self._reports(ended), self._credential)
        with self._condition:
            self._call = call
            if self._over:
                call.cancel()
        for directive in call:
            kind = directive.WhichOneof("kind")
            if kind == "registered":
                with self._condition:
                    self._registered_at = time.monotonic()
                    self._condition.notify_all()
                if self._warned:
                    self._warned = False
                    _LOG.warning("progress stream is back")
            elif kind is not None:
                self._on_directive(directive)
                if kind == "fence":
                    with self._condition:
                        self._over = True
                        self._condition.notify_all()
                    call.cancel()

    def _reports(self, ended: threading.Event) -> Iterator[pb.ProgressReport]:
        """Reports at every interval and whenever there is news. Runs in a thread of gRPC's."""
        while not ended.is_set() and not self._over:
            with self._condition:
                self._news = False
                trouble = self._trouble
            report = self._make_report()
            if trouble is not None:
                report.trouble.CopyFrom(trouble)
            yield report
            with self._condition:
                self._condition.wait_for(lambda: self._news or self._over or ended.is_set(), self._interval)
