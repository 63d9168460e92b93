# SPDX-License-Identifier: Apache-2.0
"""A worker's settings and where each came from.

Order: argument, environment, TOML file (table `[worker]` of the file that P4REDUCE_CONFIG names), default. The first
place that has a value wins, and every error names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from p4reduce import constants
from p4reduce.arrays import LANE_BITS
from p4reduce.errors import ConfigError, UsageError
from p4reduce.quantize import LaneFormat

DEFAULT_CONTROLLER: Final = "127.0.0.1:50051"
CONFIG_VARIABLE: Final = "P4REDUCE_CONFIG"
TABLE: Final = "worker"
MAX_JOB_NAME: Final = 128
_LONGEST_SECONDS: Final = 86400.0
MODES: Final = ("auto", "require", "off")
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def _controller(value: object) -> str:
    """host:port, or what gRPC calls a target: ipv4:host:port,host:port,… (ipv6: likewise), dns:///host:port."""
    text = _text(value)
    scheme, _, rest = text.partition(":")
    places = [text]
    if scheme in ("ipv4", "ipv6"):
        places = rest.split(",")
    elif scheme == "dns" and not rest.isdecimal():
        places = [rest.rpartition("/")[2]]
    for place in places:
        host, colon, port = place.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16 or "," in place:
            raise ValueError("must be host:port, or ipv4:host:port,host:port for a controller and those that stand by")
    return text


def _job(value: object) -> str:
    text = _text(value)
    if not 0 < len(text) <= MAX_JOB_NAME or not text.isprintable() or text != text.strip():
        raise ValueError(f"must be 1 to {MAX_JOB_NAME} printable characters without space around them")
    return text


def _address(value: object) -> str:
    text = _text(value)
    try:
        socket.inet_pton(socket.AF_INET, text)
    except OSError:
        raise ValueError("must be an IPv4 address such as 10.0.0.1") from None
    return text


def _level(value: object) -> str:
    text = _text(value).upper()
    if text not in _LEVELS:
        raise ValueError(f"must be one of {', '.join(_LEVELS)}")
    return text


def _mode(value: object) -> str:
    text = _text(value).lower()
    if text == "ring":  # as operators may say it, too
        return "off"
    if text not in MODES:
        raise ValueError(f"must be one of {', '.join(MODES)} (or ring, which is off)")
    return text


def _path(value: object) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else _text(value)
    if not text or "\0" in text:
        raise ValueError("must be the path of a file")
    return text


def _token(value: object) -> str:
    text = _text(value)
    if not 0 < len(text) <= 4096 or not text.isascii() or not text.isprintable() or text != text.strip():
        raise ValueError("must be printable ASCII characters without space around them")
    return text


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def _whole(low: int, high: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,10}", value.strip()):
            value = int(value)
        # numpy integers and the like are whole numbers too; bool is not meant.
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ValueError(f"must be a whole number from {low} to {high}")
        number = int(value.__index__())
        if not low <= number <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return number

    return check


def _lanes(value: object) -> int:
    number = _whole(0, max(LANE_BITS))(value)
    if number not in LANE_BITS:
        raise ValueError(f"must be one of {', '.join(map(str, LANE_BITS))}")
    return number


def _seconds(value: object) -> float:
    message = f"must be a number of seconds above 0, at most {_LONGEST_SECONDS:.0f}"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(message)
    try:
        number = float(value)
    except ValueError:
        raise ValueError(message) from None
    if not 0.0 < number <= _LONGEST_SECONDS:
        raise ValueError(message)
    return number


def _setting(
    check: Callable[[object], Any], *variables: str, default: Any = None, hint: str = "", secret: bool = False
) -> Any:
    """A field of `Settings`: how it is checked, its environment variables in order, and what to do without it.

    A `secret` is never shown: not in messages, logs or repr.
    """
    metadata = {"check": check, "variables": variables, "hint": hint, "secret": secret}
    return field(default=default, metadata=metadata, repr=not secret)


_NO_RANK: Final = "run under torchrun, or pass rank= and world_size= to connect()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `connect` needs to know. Build it with `resolve`; the constructor checks, but knows no other places."""

    controller: str = _setting(_controller, "P4REDUCE_CONTROLLER", default=DEFAULT_CONTROLLER)
    """host:port of the controller's gRPC service. Where others stand by for it: ipv4:host:port,host:port,…"""
    job: str = _setting(_job, "P4REDUCE_JOB", "TORCHELASTIC_RUN_ID", default="default")
    """Name of the training run, the same on all ranks."""
    rank: int = _setting(_whole(0, constants.MAX_WORKERS - 1), "P4REDUCE_RANK", "RANK", hint=_NO_RANK)
    """This worker's number, 0 .. world_size - 1."""
    world_size: int = _setting(_whole(1, constants.MAX_WORKERS), "P4REDUCE_WORLD_SIZE", "WORLD_SIZE", hint=_NO_RANK)
    """Workers of the job."""
    address: str | None = _setting(_address, "P4REDUCE_ADDRESS")
    """IPv4 address of the interface towards the switch. None: 127.0.1.(rank + 1) if the switch is on loopback,
    otherwise what the routing table says."""
    incarnation: int = _setting(
        _whole(0, (1 << 32) - 1), "P4REDUCE_INCARNATION", "TORCHELASTIC_RESTART_COUNT", default=0
    )
    """Rises with every restart of the job; a higher one ends the epoch of a lower one."""
    join_timeout: float = _setting(_seconds, "P4REDUCE_JOIN_TIMEOUT", default=60.0)
    """Seconds to wait for all ranks to join, and meanwhile for a controller that goes away and comes back."""
    connect_timeout: float = _setting(_seconds, "P4REDUCE_CONNECT_TIMEOUT", default=5.0)
    """Seconds to wait for the controller to answer for the first time."""
    close_timeout: float = _setting(_seconds, "P4REDUCE_CLOSE_TIMEOUT", default=5.0)
    """Seconds that close() waits for buckets in flight, and for a controller that is away."""
    mode: str = _setting(_mode, "P4REDUCE_MODE", default="auto")
    """"auto": the switch path while it works, else the ring path, where there is one. "require": the switch path or an
    error. "off": the ring path. The same on all ranks."""
    slots_min: int = _setting(_whole(0, constants.SLOTS), "P4REDUCE_SLOTS_MIN", default=0)
    """Fewer slots of the switch are not worth it: the ring path then. 0: as few as it takes, two."""
    slots_want: int = _setting(_whole(0, constants.SLOTS), "P4REDUCE_SLOTS_WANT", default=0)
    """More slots are of no use. 0: as many as a fair share gives."""
    lane_bits: int = _setting(_lanes, "P4REDUCE_LANE_BITS", default=32)
    """Bits of a lane, 32, 16 or 8, for floats whose call does not say otherwise. The same on all ranks."""
    tls_ca: str | None = _setting(_path, "P4REDUCE_TLS_CA")
    """File with the certificates (PEM) that the controller's is checked against. None: no TLS."""
    tls_cert: str | None = _setting(_path, "P4REDUCE_TLS_CERT")
    """File with this worker's own certificate (PEM), where the controller asks for one."""
    tls_key: str | None = _setting(_path, "P4REDUCE_TLS_KEY")
    """File with its private key (PEM)."""
    token: str | None = _setting(_token, "P4REDUCE_TOKEN", secret=True)
    """What the controller wants to see before it lets anybody into the job."""
    token_file: str | None = _setting(_path, "P4REDUCE_TOKEN_FILE")
    """File with the token in its first line, when `token` is not set."""
    log_level: str | None = _setting(_level, "P4REDUCE_LOG_LEVEL")
    """Level of the logger `p4reduce`. None leaves it alone."""
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Where each setting came from, by name."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name == "sources":
                continue
            value = getattr(self, item.name)
            if value is None:
                if item.metadata["hint"]:
                    names = " or ".join(item.metadata["variables"])
                    raise ConfigError(f"{item.name} is not set: {item.metadata['hint']}, or set {names}")
                continue
            object.__setattr__(self, item.name, self._checked(item.name, value, item.metadata))
        if (self.tls_cert is None) != (self.tls_key is None):
            given, other = ("tls_cert", "tls_key") if self.tls_cert is not None else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} ({self._source(given)}) needs {other}, which is not set")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ConfigError(f"tls_cert ({self._source('tls_cert')}) needs tls_ca: without it TLS is not used")
        if self.slots_min > self.slots_want > 0:
            raise ConfigError(
                f"slots_min={self.slots_min} ({self._source('slots_min')}) is more than slots_want={self.slots_want} "
                f"({self._source('slots_want')})"
            )
        try:
            LaneFormat(self.lane_bits, self.world_size).require_usable()
        except UsageError as error:
            raise ConfigError(f"lane_bits={self.lane_bits} ({self._source('lane_bits')}): {error}") from None
        if self.rank >= self.world_size:
            raise ConfigError(
                f"rank {self.rank} ({self._source('rank')}) does not fit world_size {self.world_size} "
                f"({self._source('world_size')}): ranks run from 0 to world_size - 1"
            )

    def _source(self, name: str) -> str:
        return self.sources.get(name, "argument")

    def _checked(self, name: str, value: object, metadata: Mapping[str, Any]) -> Any:
        try:
            return metadata["check"](value)
        except ValueError as error:
            shown = name if metadata["secret"] else f"{name}={value!r}"
            raise ConfigError(f"{shown} ({self._source(name)}) {error}") from None

    @classmethod
    def resolve(cls, arguments: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
        """Collect the settings from all places. An argument that is None counts as not given.

        ConfigError: a value is missing or wrong, the file cannot be read, or a name is unknown.
        """
        given = {name: value for name, value in (arguments or {}).items() if value is not None}
        environ = os.environ if environ is None else environ
        known = {item.name: item for item in fields(cls) if item.name != "sources"}
        _refuse_unknown(given, known, "argument")
        filed, path = _read_file(environ)
        _refuse_unknown(filed, known, path)
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for name, item in known.items():
            variable = next((v for v in item.metadata["variables"] if environ.get(v)), None)
            if name in given:
                values[name], sources[name] = given[name], "argument"
            elif variable is not None:
                values[name], sources[name] = environ[variable], f"environment {variable}"
            elif name in filed:
                values[name], sources[name] = filed[name], f"file {path}"
            else:
                sources[name] = "default"
        return cls(**values, sources=sources)

    def log(self, logger: logging.Logger) -> None:
        """Write the settings with their sources as one line at INFO; of secrets, whether they are set."""
        parts = []
        for item in fields(self)[:-1]:
            value = getattr(self, item.name)
            if item.metadata["secret"] and value is not None:
                value = "set"
            parts.append(f"{item.name}={value} ({self._source(item.name)})")
        logger.info("settings: %s", ", ".join(parts))


def _refuse_unknown(values: Mapping[str, Any], known: Mapping[str, Any], source: str) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)} ({source}): known are {', '.join(known)}")


def _read_file(environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """The table `[worker]` of the TOML file, {} without one, and the file's path."""
    path = environ.get(CONFIG_VARIABLE, "")
    if not path:
        return {}, ""
    try:
        content = _parse_toml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} ({CONFIG_VARIABLE}): {error}") from error
    table = content.get(TABLE, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path} ({CONFIG_VARIABLE}): {TABLE} must be a table")
    return table, path


def _parse_toml(text: str) -> dict[str, Any]:
    for module in ("tomllib", "tomli"):  # the first is part of Python from 3.11 on
        if importlib.util.find_spec(module) is not None:
            content: dict[str, Any] = importlib.import_module(module).loads(text)
            return content
    raise ConfigError(f"Python 3.10 needs `pip install tomli` to read {CONFIG_VARIABLE}")
