# SPDX-License-Identifier: Apache-2.0
"""How the numbers of a bucket are rounded: lanes, rounding, seeds, error feedback; and where that is set."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from p4reduce.config import CONFIG_VARIABLE, TABLE, _parse_toml
from p4reduce.errors import ConfigError, UsageError
from p4reduce.splitmix import GAMMA, mix_number

Rounding = Literal["nearest", "stochastic"]
LANES: Final = (32, 16, 8)
ROUNDINGS: Final = ("nearest", "stochastic")
HOOK_TABLE: Final = "hook"
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Numbers:
    """The same on all ranks: ranks that differ are told so by a MismatchError.

    ConfigError when a value makes no sense.
    """

    lane_bits: int = 32
    """Bits of a lane: 32, 16 or 8. Fewer bits, fewer bytes on the wire, a coarser sum."""
    rounding: Rounding | None = None
    """None: "stochastic" with fewer than 32 bits and no error feedback, else "nearest"; docs/numerics.md says why."""
    error_feedback: bool | None = None
    """Add what rounding took from a gradient to the next one. None: with fewer than 32 bits."""
    exact_steps: int = 0
    """Backward passes at the beginning that use 32 bits, rounded to nearest, whatever `lane_bits` says."""
    seed: int = 0
    """Of the stochastic rounding; every bucket of every step draws from a stream of its own."""

    def __post_init__(self) -> None:
        _require("lane_bits", self.lane_bits in LANES, self.lane_bits, "32, 16 or 8")
        _require("rounding", self.rounding in (None, *ROUNDINGS), self.rounding, "'nearest' or 'stochastic'")
        _require("exact_steps", self.exact_steps >= 0, self.exact_steps, "0 or more")
        _require("seed", 0 <= self.seed <= _MASK, self.seed, "a whole number of at most 64 bits")

    @property
    def feeds_back(self) -> bool:
        """Whether there are residuals."""
        return self.lane_bits < 32 if self.error_feedback is None else self.error_feedback

    def lanes(self, step: int) -> int:
        """Bits of a lane in backward pass number `step`."""
        return 32 if step < self.exact_steps else self.lane_bits

    def arguments(self, step: int, index: int) -> dict[str, Any]:
        """For `Communicator.allreduce_async`: bucket `index` of backward pass `step`."""
        if step < self.exact_steps:
            return {"lane_bits": 32, "rounding": "nearest"}
        coarse = self.lane_bits < 32 and not self.feeds_back
        rounding = self.rounding or ("stochastic" if coarse else "nearest")
        if rounding == "nearest":
            return {"lane_bits": self.lane_bits, "rounding": rounding}
        return {"lane_bits": self.lane_bits, "rounding": rounding, "seed": bucket_seed(self.seed, step, index)}


def bucket_seed(seed: int, step: int, index: int) -> int:
    """64 bits for one bucket of one backward pass: SplitMix64 with the seed, then with what that gives, and so on."""
    state = seed & _MASK
    for value in (step, index):
        state = mix_number((state + GAMMA * (value + 1)) & _MASK)
    return state


def accepts_numbers(allreduce: Callable[..., Any]) -> bool:
    """Whether a communicator's allreduce_async takes the arguments that `Numbers.arguments` makes."""
    taken = inspect.signature(allreduce).parameters
    return all(name in taken for name in ("lane_bits", "rounding", "seed", "residual"))


def require_accepted(numbers: Numbers, allreduce: Callable[..., Any]) -> bool:
    """As accepts_numbers(); UsageError when the communicator does not and `numbers` cannot do without."""
    accepted = accepts_numbers(allreduce)
    if not accepted and (numbers.lane_bits != 32 or numbers.rounding == "stochastic" or numbers.feeds_back):
        raise UsageError("this communicator knows lanes of 32 bits alone, rounded to nearest, without residuals")
    return accepted


@dataclass(frozen=True, slots=True)
class HookSettings:
    """What `P4ReduceState.from_env` finds for itself. Argument, environment, table [hook] of the file, default."""

    numbers: Numbers
    log_every: int
    trace: str | None

    @classmethod
    def resolve(cls, arguments: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> HookSettings:
        """Collect the settings. An argument that is None counts as not given. ConfigError names the bad one's place."""
        environ = os.environ if environ is None else environ
        filed, path = _read_table(environ)
        values: dict[str, Any] = {}
        for name, check in _CHECKS.items():
            variable = f"P4REDUCE_{name.upper()}"
            if arguments.get(name) is not None:
                value, place = arguments[name], f"argument {name}"
            elif environ.get(variable):
                value, place = environ[variable], f"environment {variable}"
            elif name in filed:
                value, place = filed[name], f"file {path}, {name}"
            else:
                continue
            try:
                values[name] = check(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{place} is {value!r}: {error}") from None
        own = {item.name: values[item.name] for item in fields(Numbers) if item.name in values}
        return cls(Numbers(**own), values.get("log_every", 0), values.get("trace"))


def _require(name: str, good: bool, value: object, wanted: str) -> None:
    if not good:
        raise ConfigError(f"{name} is {value!r}: it must be {wanted}")


def _read_table(environ: Mapping[str, str]) -> tuple[Mapping[str, Any], str]:
    """The table [hook] of the configuration file; lane_bits may stand in [worker] as well."""
    path = environ.get(CONFIG_VARIABLE, "")
    if not path:
        return {}, ""
    try:
        with open(path, encoding="utf-8") as file:
            content = _parse_toml(file.read())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} ({CONFIG_VARIABLE}): {error}") from error
    table = content.get(HOOK_TABLE, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path} ({CONFIG_VARIABLE}): {HOOK_TABLE} must be a table")
    unknown = sorted(set(table) - set(_CHECKS))
    if unknown:
        raise ConfigError(f"{path}: unknown setting {', '.join(unknown)} in [{HOOK_TABLE}]: known are {list(_CHECKS)}")
    worker = content.get(TABLE, {})
    shared = {"lane_bits": worker["lane_bits"]} if isinstance(worker, dict) and "lane_bits" in worker else {}
    return {**shared, **table}, path


def _whole(value: object) -> int:
    if isinstance(value, str):
        value = int(value, 0)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError("it must be a whole number")
    number = int(value.__index__())
    if number < 0:
        raise ValueError("it must be 0 or more")
    return number


def _lanes(value: object) -> int:
    number = _whole(value)
    if number not in LANES:
        raise ValueError("it must be 32, 16 or 8")
    return number


def _rounding(value: object) -> str:
    if value not in ROUNDINGS:
        raise ValueError("it must be 'nearest' or 'stochastic'")
    return str(value)


def _flag(value: object) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    found = known.get(str(value).lower())
    if found is None:
        raise ValueError("it must be 1 or 0")
    return found


def _path(value: object) -> str:
    return os.fspath(value)  # type: ignore[call-overload,no-any-return]  # TypeError for what is no path


_CHECKS: dict[str, Callable[[object], Any]] = {
    "lane_bits": _lanes,
    "rounding": _rounding,
    "error_feedback": _flag,
    "exact_steps": _whole,
    "seed": _whole,
    "log_every": _whole,
    "trace": _path,
}
