# SPDX-License-Identifier: Apache-2.0
"""From the arrays of a call to a bucket and back: types, shapes, and copies where they cannot be avoided.

float32 is reduced where it is. float16 is reduced as float32, and the result rounded back: a float16 sum overflows
early, and so may the result, to infinity. int32 is summed exactly or not at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from p4reduce.core.bucket import ROUNDINGS, IntegerReduction, Reduction
from p4reduce.errors import UsageError

Array = npt.NDArray[Any]
Finish = Callable[[], Array]

OPS: Final = ("sum", "mean")
LANE_BITS: Final = (32, 16, 8)
_DTYPES: Final = ("float32", "float16", "int32")


def make_bucket(
    array: object,
    op: str,
    out: object,
    lane_bits: int | None = None,
    rounding: str | None = None,
    seed: int = 0,
    residual: object = None,
) -> tuple[Reduction | IntegerReduction, Finish]:
    """The bucket for a call of `allreduce`, whose arguments these are, and what makes its result.

    Copies only what is not contiguous or overlaps in part, and float16. UsageError for arguments that break a rule.
    """
    if op not in OPS:
        raise UsageError(f"op {op!r} is not known: use one of {', '.join(OPS)}")
    if isinstance(array, np.generic):  # what indexing and sum() return instead of an array without dimensions
        array = np.asarray(array)
    source = _checked(array, "array")
    result = np.empty(source.shape, source.dtype) if out is None else _output(out, "out", source, source.dtype)
    if source.dtype == np.int32:
        return _integers(source, op, result, lane_bits, rounding, residual)
    choice = _choice(lane_bits, rounding, seed)
    if source.dtype == np.float16:
        data, target, direct = source.astype(np.float32).reshape(-1), np.empty(source.size, np.float32), False
    else:
        data, target, direct = _memory(source, result)
    left = None if residual is None else _output(residual, "residual", source, np.dtype(np.float32))
    kept, kept_direct = (None, True) if left is None else _flat(left)
    if left is not None and any(np.may_share_memory(left, other) for other in (source, result)):
        raise UsageError("residual overlaps with array or out: it needs memory of its own")
    bucket = Reduction(data, target, op == "mean", residual=kept, dtype=source.dtype.name, **choice)

    def finish() -> Array:
        if not direct:
            with np.errstate(over="ignore"):  # beyond float16 is infinity
                result[...] = target.reshape(result.shape)
        if left is not None and kept is not None and not kept_direct:
            left[...] = kept.reshape(left.shape)
        return result

    return bucket, finish


def _integers(
    source: Array, op: str, result: Array, lane_bits: int | None, rounding: str | None, residual: object
) -> tuple[IntegerReduction, Finish]:
    if op != "sum":
        raise UsageError(f"int32 is summed exactly: op must be 'sum', not {op!r}")
    if lane_bits is not None or rounding is not None or residual is not None:
        raise UsageError("int32 is summed exactly: lane_bits, rounding and residual are for floats")
    data, target, direct = _memory(source, result)
    bucket = IntegerReduction(data, target)

    def finish() -> Array:
        if bucket.error is not None:
            raise UsageError(f"{bucket.describe()}: {bucket.error}")
        if not direct:
            result[...] = target.reshape(result.shape)
        return result

    return bucket, finish


def _choice(lane_bits: int | None, rounding: str | None, seed: int) -> dict[str, Any]:
    if lane_bits is not None and (isinstance(lane_bits, bool) or lane_bits not in LANE_BITS):
        raise UsageError(f"lane_bits is one of {', '.join(map(str, LANE_BITS))}, not {lane_bits!r}")
    if rounding is not None and rounding not in ROUNDINGS:
        raise UsageError(f"rounding is one of {', '.join(ROUNDINGS)}, not {rounding!r}")
    try:
        number = operator.index(seed)
    except TypeError:
        raise UsageError(f"a seed is a whole number, not {seed!r}") from None
    return {"lane_bits": lane_bits, "rounding": rounding or "nearest", "seed": number}


def _memory(source: Array, result: Array) -> tuple[Array, Array, bool]:
    """Data and target of a bucket, flat, and whether the target is the result's own memory."""
    target, direct = _flat(result)
    data = source if source.flags.c_contiguous and source.flags.aligned else source.copy(order="C")
    data = data.reshape(-1)
    same = data.__array_interface__["data"][0] == target.__array_interface__["data"][0]
    if not same and np.may_share_memory(data, target):
        data = data.copy()
    return data, target, direct


def _flat(array: Array) -> tuple[Array, bool]:
    """A vector to write to, and whether it is the array's own memory."""
    direct = array.flags.c_contiguous and array.flags.aligned
    return (np.asarray(array).reshape(-1) if direct else np.empty(array.size, array.dtype)), direct


def _checked(array: object, name: str) -> Array:
    if not isinstance(array, np.ndarray):
        raise UsageError(
            f"{name} must be a numpy array, not {type(array).__name__}: np.asarray(..., dtype=np.float32) makes one"
        )
    if array.dtype.name not in _DTYPES or not array.dtype.isnative:
        raise UsageError(
            f"{name} must be {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}, not {array.dtype}: "
            f"{name}.astype(np.float32) makes a copy that is"
        )
    return np.asarray(array)


def _output(array: object, name: str, source: Array, dtype: np.dtype[Any]) -> Array:
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{name} must be a numpy array, not {type(array).__name__}")
    if array.dtype != dtype:
        raise UsageError(f"{name} must be {dtype}, not {array.dtype}")
    if array.shape != source.shape:
        raise UsageError(f"{name} has the shape {array.shape}, array {source.shape}: they must be equal")
    if not array.flags.writeable:
        raise UsageError(f"{name} is read-only: pass a writeable array, or none")
    return array
