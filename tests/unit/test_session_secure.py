# SPDX-License-Identifier: Apache-2.0
"""TLS between worker and controller, with certificates made for the test."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from helpers.control import World

import p4reduce
from p4reduce.errors import ConfigError, ControllerError

COMMANDS = """
new="openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
$new -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.pem
for name in controller worker; do
    $new -subj "/CN=$name" -keyout $name.key -out $name.csr
    printf 'subjectAltName=IP:127.0.0.1' > extra
    openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extra -out $name.pem
done
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, a controller's and a worker's certificate; in `other` the same once more."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("certificates")
    for place in (folder, folder / "other"):
        place.mkdir(exist_ok=True)
        subprocess.run(["bash", "-euc", COMMANDS], cwd=place, check=True, capture_output=True, timeout=60)
    return folder


@contextmanager
def world(folder: Path, *, mutual: bool) -> Iterator[World]:
    pair = ((folder / "controller.key").read_bytes(), (folder / "controller.pem").read_bytes())
    authority = (folder / "ca.pem").read_bytes() if mutual else None
    made = World(grpc.ssl_server_credentials([pair], authority, mutual))
    try:
        yield made
    finally:
        made.close()


def test_the_controller_is_known_by_its_certificate(certificates: Path) -> None:
    with world(certificates, mutual=False) as made:
        (comm,) = made.connect(1, tls_ca=str(certificates / "ca.pem"), token="t")
        assert (comm.allreduce(np.ones(9, np.float32)) == 1).all()
        assert made.controller.tokens == {"Bearer t"}


def test_both_are_known_by_their_certificates(certificates: Path) -> None:
    own: dict[str, Any] = {
        name: str(certificates / file) for name, file in (("tls_cert", "worker.pem"), ("tls_key", "worker.key"))
    }
    with world(certificates, mutual=True) as made:
        (comm,) = made.connect(1, tls_ca=str(certificates / "ca.pem"), **own)
        assert (comm.allreduce(np.ones(9, np.float32)) == 1).all()


@pytest.mark.parametrize(
    ("mutual", "files"),
    [
        (False, {}),
        (False, {"tls_ca": "other/ca.pem"}),
        (True, {"tls_ca": "ca.pem"}),
        (True, {"tls_ca": "ca.pem", "tls_cert": "other/worker.pem", "tls_key": "other/worker.key"}),
    ],
    ids=["plain", "another authority", "no certificate", "a stranger's certificate"],
)
def test_strangers_do_not_get_in(certificates: Path, mutual: bool, files: dict[str, str]) -> None:
    arguments: dict[str, Any] = {name: str(certificates / file) for name, file in files.items()}
    with world(certificates, mutual=mutual) as made:
        with pytest.raises(ControllerError, match="not reachable") as found:
            p4reduce.connect(made.controller.address, "job", 0, 1, connect_timeout=0.5, **arguments)
        assert ("does tls_ca fit its certificate" in str(found.value)) == bool(files)
        assert made.controller.jobs == {}


def test_files_that_are_not_there_are_named(certificates: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read tls_ca /nowhere/ca.pem: No such file"):
        p4reduce.connect("127.0.0.1:1", "job", 0, 1, tls_ca="/nowhere/ca.pem")
    with pytest.raises(ConfigError, match=r"cannot read tls_key .*: "):
        p4reduce.connect(
            "127.0.0.1:1",
            "job",
            0,
            1,
            tls_ca=str(certificates / "ca.pem"),
            tls_cert=str(certificates / "worker.pem"),
            tls_key=str(certificates),
        )
