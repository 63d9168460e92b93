# SPDX-License-Identifier: Apache-2.0
"""`p4reduce-controller serve` as a process of its own, and a hosts file for an embedded switch with UDP ports."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEADLINE = 30.0


class ControllerProcess:
    """A running command. `line` reads what it says on stdout; `log` is what it has said on stderr so far."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "p4reduce_controller.serve", "serve", "--ready-json", *arguments]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._log: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.popen.stdout, self._lines.put), daemon=True),
            threading.Thread(target=self._read, args=(self.popen.stderr, self._log.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.address = ""

    def _read(self, stream: Any, sink: Any) -> None:
        for line in stream:
            sink(line)
        sink("")

    @property
    def log(self) -> str:
        return "".join(self._log)

    def line(self) -> dict[str, Any]:
        """The next line of JSON."""
        try:
            text = self._lines.get(timeout=DEADLINE)
        except queue.Empty:
            raise AssertionError(f"the controller says nothing: {self.log}") from None
        assert text, f"the controller has ended: {self.log}"
        found: dict[str, Any] = json.loads(text)
        return found

    def ready(self) -> ControllerProcess:
        """Wait until workers can join."""
        while not (said := self.line())["ready"]:
            pass
        self.address = said["address"]
        return self

    def kill(self) -> None:
        """kill -9."""
        self.popen.kill()
        self.wait()

    def wait(self) -> int:
        """Wait for the end; its exit code."""
        code = self.popen.wait(DEADLINE)
        for reader in self._readers:
            reader.join(DEADLINE)
        return code

    def end(self) -> None:
        """For the end of a test: whatever is still there goes."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.wait()
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()


def write_hosts(folder: Path, grpc_address: str, endpoints: Mapping[int, tuple[str, int]], profile: str = "w5") -> Path:
    """A hosts file: port p belongs to 127.0.1.p."""
    lines = [
        f'[switch]\ngrpc = "{grpc_address}"\nprofile = "{profile}"\nip = "127.0.1.254"\nmac = "02:70:7f:00:01:fe"\n'
    ]
    for port, (address, number) in endpoints.items():
        endpoint = f"{address}:{number}"
        lines.append(f'[[host]]\nname = "h{port}"\nip = "127.0.1.{port}"\nport = {port}\nendpoint = "{endpoint}"\n')
    file = folder / "hosts.toml"
    file.write_text("\n".join(lines))
    return file
