"""Numbers on their way out of Python: every one of them, in its place, or an error."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import InvalidRequestError
from engine.step_arrays import copy_ids, ids_array, pack
from engine.types import GenerationRequest
from engine.validation import check_request

IDS = [0, 1, 2**30, -1, 2**31 - 1, -(2**31), 151_935]


@pytest.mark.parametrize("ids", [IDS, tuple(IDS), list(np.array(IDS))], ids=["list", "tuple", "numpy numbers"])
def test_ids_are_copied_from_where_they_begin(ids: list[int]) -> None:
    assert ids_array(ids, 0, 7).tolist() == IDS
    out = np.full(6, 9, dtype=np.int32)
    copy_ids(out[1:4], ids, 2)
    assert out.tolist() == [9, *IDS[2:5], 9, 9]
    assert ids_array(ids, 7, 7).tolist() == []


@pytest.mark.parametrize(
    ("ids", "begin", "error"),
    [
        ([1, 2, 3], 2, IndexError),
        ([1, 2, 3], -1, IndexError),
        ([1, 2**31], 0, OverflowError),
        ([-(2**31) - 1, 1], 0, OverflowError),
        ([1, 2**70], 0, OverflowError),
        ([1, "2"], 0, TypeError),
        ([1.0, 2], 0, TypeError),
    ],
)
def test_what_cannot_be_copied_is_an_error(ids: list[int], begin: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        copy_ids(np.zeros(2, dtype=np.int32), ids, begin)


def test_arrays_are_packed_at_their_offsets_whatever_their_layout() -> None:
    table = np.arange(24, dtype=np.int32).reshape(4, 6)
    arrays = [table[:, 1:3], np.array([1.5], dtype=np.float32), np.array([-7], dtype=np.int64), table[:0]]
    out = np.full(64, 255, dtype=np.uint8)
    pack(out, arrays, [0, 36, 48, 64])
    assert out[:32].view(np.int32).tolist() == table[:, 1:3].ravel().tolist()
    assert out[36:40].view(np.float32).tolist() == [1.5]
    assert out[48:56].view(np.int64).tolist() == [-7]
    assert (out[[*range(32, 36), *range(40, 48), *range(56, 64)]] == 255).all()


@pytest.mark.parametrize("offsets", [[61], [-4], [2**40]])
def test_an_array_that_has_no_room_is_an_error(offsets: list[int]) -> None:
    with pytest.raises(IndexError):
        pack(np.zeros(64, dtype=np.uint8), [np.zeros(1, dtype=np.int32)], offsets)


def test_as_many_offsets_as_arrays() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        pack(np.zeros(64, dtype=np.uint8), [np.zeros(1, dtype=np.int32)], [])


@pytest.mark.parametrize("bad", [-1, 100, 2**31, 2**70, -(2**40)])
def test_an_id_outside_the_vocabulary_is_named(bad: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"token id {bad} is outside the vocabulary of 100"):
        check_request(GenerationRequest("a", [5, 99, bad, 0]), 100, ())
    check_request(GenerationRequest("a", [5, 99, 0]), 100, ())
