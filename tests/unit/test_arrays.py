# SPDX-License-Identifier: Apache-2.0
"""What `allreduce` makes of its arguments: buckets without needless copies, results in place, rules for every type."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from p4reduce.arrays import Array, Finish, make_bucket
from p4reduce.core.bucket import IntegerReduction, Reduction
from p4reduce.errors import UsageError
from p4reduce.quantize import LaneFormat


def floats(*arguments: Any, **more: Any) -> tuple[Reduction, Finish]:
    bucket, finish = make_bucket(*arguments, **more)
    assert isinstance(bucket, Reduction)
    return bucket, finish


def same_memory(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.ctypes.data == b.ctypes.data


def layouts(dtype: Any) -> list[Array]:
    base = np.arange(24).astype(dtype).reshape(2, 3, 4)
    return [
        base.copy(),
        base.transpose(2, 0, 1),
        base[:, ::2],
        base[:, :, ::-1],
        base[0, 0, :1].reshape(()),
        base[:, :0],
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize("inplace", [False, True])
def test_layouts_and_results(dtype: Any, inplace: bool) -> None:
    for array in layouts(dtype):
        before = array.copy()
        bucket, finish = make_bucket(array, "sum", array if inplace else None)
        contiguous = array.flags.c_contiguous and dtype != np.float16
        assert same_memory(bucket.data, array) == contiguous
        assert same_memory(bucket.data, bucket.out) == (inplace and contiguous)
        assert bucket.data.tolist() == before.reshape(-1).tolist()
        bucket.out[:] = bucket.data + 1
        result = finish()
        assert result.dtype == dtype
        assert result.shape == array.shape
        assert (result is array) == inplace
        assert np.array_equal(result, before + 1)


def test_scalars_of_numpy() -> None:
    for scalar in (np.float32(2.5), np.float16(2.5), np.int32(7)):
        bucket, finish = make_bucket(scalar, "sum", None)
        bucket.out[:] = bucket.data
        assert finish().tolist() == scalar.item()


def test_half_precision_goes_through_float32() -> None:
    array = np.array([60000, -60000, 1e-7, np.nan, 1.0], dtype=np.float16)
    bucket, finish = floats(array, "sum", None)
    assert (bucket.dtype, bucket.data.dtype) == ("float16", np.float32)
    bucket.out[:] = [120000, -120000, 2.0**-24 * 3, np.nan, 1.0 + 2**-11]
    with np.errstate(all="raise"):
        found = finish()
    assert found.dtype == np.float16
    # Beyond the range: infinity. Subnormals stay. Ties to even.
    assert found[[0, 1, 2, 4]].tolist() == [np.inf, -np.inf, 2.0**-24 * 3, 1.0]
    assert np.isnan(found[3])


def test_choices_are_passed_on() -> None:
    array = np.zeros(10, dtype=np.float32)
    bucket, _ = floats(array, "mean", None)
    assert (bucket.mean, bucket.lane_bits, bucket.rounding, bucket.seed, bucket.residual) == (
        True,
        None,
        "nearest",
        0,
        None,
    )
    residual = np.zeros(10, dtype=np.float32)
    bucket, _ = floats(array, "sum", None, lane_bits=8, rounding="stochastic", seed=np.int64(5), residual=residual)
    assert (bucket.mean, bucket.lane_bits, bucket.rounding, bucket.seed) == (False, 8, "stochastic", 5)
    assert bucket.residual is not None
    assert same_memory(bucket.residual, residual)
    assert bucket.lane_format(LaneFormat(32, 2)) == LaneFormat(8, 2, 1024)


def test_residuals_of_any_layout() -> None:
    array = np.zeros((3, 4), dtype=np.float32)
    for residual in (
        np.zeros((3, 4), np.float32),
        np.zeros((4, 3), np.float32).T,
        np.zeros((3, 8), np.float32)[:, ::2],
    ):
        bucket, finish = floats(array, "sum", None, residual=residual)
        assert bucket.residual is not None
        bucket.residual[:] = np.arange(12)
        finish()
        assert residual.tolist() == np.arange(12.0).reshape(3, 4).tolist()


def test_integers_that_do_not_fit_raise() -> None:
    array = np.arange(5, dtype=np.int32)
    bucket, finish = make_bucket(array, "sum", array)
    assert isinstance(bucket, IntegerReduction)
    bucket.number, bucket.error = 3, UsageError("the sum of element 0 is too large")
    with pytest.raises(UsageError, match=r"bucket 3 \(sum of 5 int32\): the sum of element 0 is too large"):
        finish()


ZEROS, NUMBERS = np.zeros((2, 3), np.float32), np.zeros(4, np.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], "sum", None), "array must be a numpy array, not list"),
        ((np.zeros(3), "sum", None), r"array must be float32, float16 or int32, not float64"),
        ((np.zeros(3, ">f4"), "sum", None), "not >f4"),
        ((np.zeros(3, np.int64), "sum", None), "not int64"),
        ((np.zeros(3, np.uint32), "sum", None), "not uint32"),
        ((ZEROS, "max", None), "op 'max' is not known"),
        ((ZEROS, "sum", [0.0]), "out must be a numpy array"),
        ((ZEROS, "sum", np.zeros((2, 3), np.float16)), "out must be float32, not float16"),
        ((np.zeros(3, np.float16), "sum", np.zeros(3, np.float32)), "out must be float16, not float32"),
        ((ZEROS, "sum", np.zeros((3, 2), np.float32)), r"out has the shape \(3, 2\), array \(2, 3\)"),
        ((ZEROS, "sum", np.broadcast_to(np.float32(0), (2, 3))), "out is read-only"),
        ((ZEROS, "sum", None, 64), "lane_bits is one of 32, 16, 8, not 64"),
        ((ZEROS, "sum", None, True), "lane_bits is one of"),
        ((ZEROS, "sum", None, 8, "up"), "rounding is one of nearest, stochastic, not 'up'"),
        ((ZEROS, "sum", None, 8, "stochastic", 0.5), "a seed is a whole number"),
        ((ZEROS, "sum", None, 8, "stochastic", -1), "a seed is a number of 64 bits"),
        ((ZEROS, "sum", None, 8, None, 0, np.zeros((2, 3))), "residual must be float32, not float64"),
        ((ZEROS, "sum", None, 8, None, 0, np.zeros(6, np.float32)), "residual has the shape"),
        ((ZEROS, "sum", None, 8, None, 0, ZEROS), "residual overlaps"),
        ((ZEROS, "sum", None, 8, None, 0, ZEROS[::-1]), "residual overlaps"),
        ((NUMBERS, "mean", None), "int32 is summed exactly: op must be 'sum'"),
        ((NUMBERS, "sum", None, 32), "int32 is summed exactly: lane_bits, rounding and residual"),
        ((NUMBERS, "sum", None, None, "nearest"), "int32 is summed exactly"),
        ((NUMBERS, "sum", None, None, None, 0, NUMBERS), "int32 is summed exactly"),
    ],
)
def test_broken_rules(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_bucket(*arguments)
