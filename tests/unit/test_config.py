# SPDX-License-Identifier: Apache-2.0
"""Settings: order of the places, checks, and errors that name the setting and where it came from."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p4reduce import constants
from p4reduce.config import DEFAULT_CONTROLLER, Settings
from p4reduce.errors import ConfigError

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "run-7", "TORCHELASTIC_RESTART_COUNT": "3"}


def resolve(arguments: dict[str, Any] | None = None, /, **environ: str) -> Settings:
    return Settings.resolve(arguments, environ)


def write(path: Path, text: str) -> dict[str, str]:
    file = path / "p4reduce.toml"
    file.write_text(text)
    return {"P4REDUCE_CONFIG": str(file)}


def test_under_torchrun_nothing_needs_to_be_set() -> None:
    settings = resolve(**TORCHRUN)
    assert (settings.rank, settings.world_size, settings.job, settings.incarnation) == (2, 4, "run-7", 3)
    assert settings.controller == DEFAULT_CONTROLLER
    assert (settings.join_timeout, settings.connect_timeout, settings.address) == (60.0, 5.0, None)
    assert settings.sources["rank"] == "environment RANK"
    assert settings.sources["job"] == "environment TORCHELASTIC_RUN_ID"
    assert settings.sources["controller"] == "default"


def test_argument_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    environ = TORCHRUN | write(
        tmp_path, '[worker]\ncontroller = "c:1"\njoin_timeout = 3\njob = "filed"\nrank = 0\n[other]\nx = 1\n'
    )
    settings = resolve(**environ)
    assert (settings.controller, settings.join_timeout) == ("c:1", 3.0)
    assert (settings.job, settings.rank) == ("run-7", 2)
    assert settings.sources["controller"] == f"file {environ['P4REDUCE_CONFIG']}"

    settings = resolve(**environ, P4REDUCE_CONTROLLER="d:2", P4REDUCE_JOB="named", P4REDUCE_JOIN_TIMEOUT="1.5")
    assert (settings.controller, settings.job, settings.join_timeout) == ("d:2", "named", 1.5)
    assert settings.sources["job"] == "environment P4REDUCE_JOB"

    arguments = {"controller": "e:3", "job": None, "rank": 1, "join_timeout": 2}
    settings = resolve(arguments, **environ, P4REDUCE_CONTROLLER="d:2", P4REDUCE_RANK="3")
    assert (settings.controller, settings.job, settings.rank, settings.join_timeout) == ("e:3", "run-7", 1, 2.0)
    assert settings.sources["controller"] == "argument"


def test_every_variable_is_read() -> None:
    settings = resolve(
        P4REDUCE_CONTROLLER="[::1]:9",
        P4REDUCE_JOB="j",
        P4REDUCE_RANK="1",
        P4REDUCE_WORLD_SIZE="2",
        P4REDUCE_ADDRESS="10.0.0.1",
        P4REDUCE_INCARNATION="8",
        P4REDUCE_JOIN_TIMEOUT="1",
        P4REDUCE_CONNECT_TIMEOUT="2",
        P4REDUCE_CLOSE_TIMEOUT="3",
        P4REDUCE_MODE="Require",
        P4REDUCE_SLOTS_MIN="4",
        P4REDUCE_SLOTS_WANT="64",
        P4REDUCE_LANE_BITS="16",
        P4REDUCE_TLS_CA="ca.pem",
        P4REDUCE_TLS_CERT="cert.pem",
        P4REDUCE_TLS_KEY="key.pem",
        P4REDUCE_TOKEN="secret",
        P4REDUCE_TOKEN_FILE="token",
        P4REDUCE_LOG_LEVEL="debug",
        RANK="0",
        WORLD_SIZE="1",
    )
    expected = Settings(
        controller="[::1]:9",
        job="j",
        rank=1,
        world_size=2,
        address="10.0.0.1",
        incarnation=8,
        join_timeout=1.0,
        connect_timeout=2.0,
        close_timeout=3.0,
        mode="require",
        slots_min=4,
        slots_want=64,
        lane_bits=16,
        tls_ca="ca.pem",
        tls_cert="cert.pem",
        tls_key="key.pem",
        token="secret",
        token_file="token",
        log_level="DEBUG",
    )
    assert settings == expected
    names = {field.name for field in dataclasses.fields(Settings)} - {"sources"}
    assert {name for name in names if settings.sources[name].startswith("environment")} == names


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, r"rank is not set: run under torchrun, or pass rank=.* or set P4REDUCE_RANK or RANK"),
        ({"RANK": "0"}, r"world_size is not set.*WORLD_SIZE"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "P4REDUCE_LANE_BITS": "12"},
            r"lane_bits='12' \(environment P4REDUCE_LANE_BITS\) must be one of 32, 16, 8",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "64", "P4REDUCE_LANE_BITS": "8"},
            r"lane_bits=8 \(environment P4REDUCE_LANE_BITS\): 8-bit lanes are too narrow for 64 workers",
        ),
        (
            {"RANK": "4", "WORLD_SIZE": "4"},
            r"rank 4 \(environment RANK\) does not fit world_size 4 \(environment",
        ),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, r"rank='-1' \(environment RANK\) must be a whole number from 0 to 63"),
        ({"RANK": "1.0", "WORLD_SIZE": "4"}, r"rank='1.0'"),
        ({"RANK": "0", "WORLD_SIZE": "65"}, r"world_size='65' \(environment WORLD_SIZE\).* 1 to 64"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, r"world_size='0'"),
        ({"RANK": "0", "WORLD_SIZE": "99999999999999999999"}, r"world_size="),
        (TORCHRUN | {"P4REDUCE_CONTROLLER": "nowhere"}, r"controller='nowhere' \(.*P4REDUCE_CONTROLLER\) .*host:port"),
        (TORCHRUN | {"P4REDUCE_CONTROLLER": "h:0"}, r"controller='h:0'"),
        (TORCHRUN | {"P4REDUCE_CONTROLLER": "h:65536"}, r"controller='h:65536'"),
        (TORCHRUN | {"P4REDUCE_CONTROLLER": ":1"}, r"controller=':1'"),
        (
            TORCHRUN | {"P4REDUCE_ADDRESS": "10.0.0"},
            r"address='10.0.0' \(.*P4REDUCE_ADDRESS\) must be an IPv4",
        ),
        (TORCHRUN | {"P4REDUCE_ADDRESS": "::1"}, r"address='::1'"),
        (TORCHRUN | {"P4REDUCE_JOB": "x" * 129}, r"job='x+' \(environment P4REDUCE_JOB\) must be 1 to 128"),
        (TORCHRUN | {"P4REDUCE_JOB": " x"}, r"job=' x'"),
        (TORCHRUN | {"P4REDUCE_JOB": "a\nb"}, r"job='a\\nb'"),
        (TORCHRUN | {"P4REDUCE_JOIN_TIMEOUT": "soon"}, r"join_timeout='soon' \(.*P4REDUCE_JOIN_TIMEOUT\) .* seconds"),
        (TORCHRUN | {"P4REDUCE_JOIN_TIMEOUT": "0"}, r"join_timeout='0'"),
        (TORCHRUN | {"P4REDUCE_JOIN_TIMEOUT": "inf"}, r"join_timeout='inf'"),
        (TORCHRUN | {"P4REDUCE_JOIN_TIMEOUT": "nan"}, r"join_timeout='nan'"),
        (TORCHRUN | {"P4REDUCE_LOG_LEVEL": "loud"}, r"log_level='loud' .*DEBUG, INFO"),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "4294967296"}, r"incarnation='4294967296'"),
        (TORCHRUN | {"P4REDUCE_CONTROLLER": "ipv4:a:1,b"}, r"controller='ipv4:a:1,b'"),
        (TORCHRUN | {"P4REDUCE_CONTROLLER": "a:1,b:2"}, r"controller='a:1,b:2' .*ipv4:host:port,host:port"),
        (TORCHRUN | {"P4REDUCE_CONTROLLER": "dns:///a"}, r"controller='dns:///a'"),
        (TORCHRUN | {"P4REDUCE_MODE": "rings"}, r"mode='rings' \(.*P4REDUCE_MODE\) must be one of auto, require, off"),
        (TORCHRUN | {"P4REDUCE_SLOTS_MIN": str(constants.SLOTS + 1)}, rf"slots_min='{constants.SLOTS + 1}'"),
        (
            TORCHRUN | {"P4REDUCE_SLOTS_MIN": "9", "P4REDUCE_SLOTS_WANT": "8"},
            r"slots_min=9 \(environment P4REDUCE_SLOTS_MIN\) is more than slots_want=8",
        ),
        (TORCHRUN | {"P4REDUCE_TLS_CERT": "c"}, r"tls_cert \(environment P4REDUCE_TLS_CERT\) needs tls_key"),
        (TORCHRUN | {"P4REDUCE_TLS_KEY": "k"}, r"tls_key \(.*\) needs tls_cert, which is not set"),
        (TORCHRUN | {"P4REDUCE_TLS_CERT": "c", "P4REDUCE_TLS_KEY": "k"}, r"tls_cert \(.*\) needs tls_ca"),
        (TORCHRUN | {"P4REDUCE_TOKEN": "two lines\n"}, r"^token \(environment P4REDUCE_TOKEN\) must be printable"),
        (TORCHRUN | {"P4REDUCE_CONFIG": "/nowhere/x.toml"}, r"cannot read /nowhere/x.toml \(P4REDUCE_CONFIG\)"),
    ],
)
def test_wrong_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(**environ)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": True}, r"rank=True \(argument\)"),
        ({"rank": 1.0}, r"rank=1.0 \(argument\)"),
        ({"job": 5}, r"job=5 \(argument\) must be a string"),
        ({"join_timeout": True}, r"join_timeout=True"),
        ({"join_timeout": [1]}, r"join_timeout=\[1\]"),
        ({"colour": "red"}, r"unknown setting colour \(argument\): known are controller, job, rank"),
        ({"sources": {}}, r"unknown setting sources"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(arguments, **TORCHRUN)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[worker]\ncolour = 1\n", r"unknown setting colour \(.*p4reduce.toml\)"),
        ("[worker]\njoin_timeout = 'x'\n", r"join_timeout='x' \(file .*p4reduce.toml\)"),
        ("worker = 5\n", r"p4reduce.toml \(P4REDUCE_CONFIG\): worker must be a table"),
        ("[worker\n", r"cannot read .*p4reduce.toml \(P4REDUCE_CONFIG\)"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(**TORCHRUN, **write(tmp_path, text))


def test_numpy_integers_are_whole_numbers() -> None:
    settings = resolve({"rank": np.int64(1), "world_size": np.int32(2)})
    assert type(settings.rank) is int
    assert (settings.rank, settings.world_size) == (1, 2)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert resolve(**TORCHRUN, P4REDUCE_JOB="", P4REDUCE_CONTROLLER="", P4REDUCE_CONFIG="").job == "run-7"


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve(**TORCHRUN).rank = 3  # type: ignore[misc]


def test_one_log_line_tells_all_settings_and_their_sources(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="p4reduce"):
        resolve({"job": "named"}, **TORCHRUN).log(logging.getLogger("p4reduce.test"))
    (record,) = caplog.records
    text = record.getMessage()
    assert "job=named (argument)" in text
    assert "rank=2 (environment RANK)" in text
    assert f"controller={DEFAULT_CONTROLLER} (default)" in text
    for name in resolve(**TORCHRUN).sources:
        assert f"{name}=" in text


@pytest.mark.parametrize(
    "target", ["host:1", "[::1]:9", "ipv4:10.0.0.1:1,10.0.0.2:2", "ipv6:[::1]:1,[::2]:2", "dns:///host:1", "dns:5"]
)
def test_a_controller_may_be_several(target: str) -> None:
    assert resolve({"controller": target}, **TORCHRUN).controller == target


def test_secrets_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    settings = resolve(**TORCHRUN, P4REDUCE_TOKEN="quite-secret")
    assert settings.token == "quite-secret"
    with caplog.at_level(logging.INFO, logger="p4reduce"):
        settings.log(logging.getLogger("p4reduce.test"))
        resolve(**TORCHRUN).log(logging.getLogger("p4reduce.test"))
    with pytest.raises(ConfigError) as found:
        resolve(**TORCHRUN, P4REDUCE_TOKEN=" quite-secret")
    assert "quite-secret" not in f"{caplog.text}{settings!r}{found.value}"
    assert "token=set (environment P4REDUCE_TOKEN)" in caplog.records[0].getMessage()
    assert "token=None (default)" in caplog.records[1].getMessage()


def test_a_path_may_be_a_path(tmp_path: Path) -> None:
    assert resolve({"tls_ca": tmp_path / "ca.pem"}, **TORCHRUN).tls_ca == str(tmp_path / "ca.pem")


def test_ring_is_another_word_for_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (TORCHRUN | {"P4REDUCE_MODE": "Ring"}).items():
        monkeypatch.setenv(name, value)
    assert Settings.resolve({}).mode == "off"
