# SPDX-License-Identifier: Apache-2.0
"""A TCP relay that can fall silent without closing anything, as a cut cable does; also a way into a namespace."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from p4reduce_bmv2 import netns

_CHUNK = 65536
_CONNECT_SECONDS = 2.0
_T = TypeVar("_T")


class Relay:
    """Listens at one place, connects to another, and carries bytes between them. Close it.

    A connection that the far side refuses or closes is closed here as well. `silence` holds everything back, new
    connections too, until `resume`.
    """

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], inside: str = "", towards: str = "") -> None:
        """`inside`: namespace to listen in; `towards`: namespace to connect in; "" is the caller's own."""
        self._target = target
        self._towards = towards
        self._flowing = threading.Event()
        self._flowing.set()
        self._closed = False
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self.held = 0
        """Times that bytes or a connection had to wait."""
        self._listener = _in(inside, lambda: socket.create_server(listen))
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        """Where to connect to."""
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def silence(self) -> None:
        """From now on nothing passes."""
        self._flowing.clear()

    def resume(self) -> None:
        """What was held back goes on."""
        self._flowing.set()

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()
        with self._lock:
            for one in self._sockets:
                _shut(one)
        self._flowing.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), name="relay-serve", daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near:
            self._wait()
            try:
                far = _in(self._towards, lambda: socket.create_connection(self._target, _CONNECT_SECONDS))
            except OSError:
                return
            with far:
                far.settimeout(None)
                with self._lock:
                    if self._closed:
                        return
                    self._sockets |= {near, far}
                back = threading.Thread(target=self._pump, args=(far, near), name="relay-back", daemon=True)
                back.start()
                self._pump(near, far)
                back.join()
                with self._lock:
                    self._sockets -= {near, far}

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                self._wait()
                sink.sendall(data)
        # An end is news as well: it must not pass a silence.
        self._wait()
        _shut(source)
        _shut(sink)

    def _wait(self) -> None:
        if not self._flowing.is_set() and not self._closed:
            self.held += 1
            self._flowing.wait()


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _in(namespace: str, action: Callable[[], _T]) -> _T:
    return netns.call(namespace, action) if namespace else action()
