"""A step's arrays on their way to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.run.staging import Array, DeviceStaging, Views

pytestmark = pytest.mark.gpu


def arrays(length: int, start: int) -> list[Array]:
    """Of every dtype and of one and two axes, empty and not dense ones among them; the first comes again at the end."""
    numbers = np.arange(start, start + length, dtype=np.int32)
    table = np.arange(12 * length, dtype=np.int32).reshape(length, 12)[:, :5] + start
    floats = np.linspace(start, start + 1, 3, dtype=np.float32)
    found: list[Array] = [
        numbers,
        numbers.astype(np.int64),
        table[:, 1:4],
        floats,
        table[:0],
        numbers[:0],
        numbers[1:2],
    ]
    return [*found, found[0]]


def test_they_arrive_as_they_are_at_addresses_given_by_their_shapes(gpu: None) -> None:
    staging = DeviceStaging[Views](4999, torch.device("cuda"))
    places = []
    for start in (3, 70, 900, -5):
        given = arrays(37, start)
        views = staging.upload(given, as_they_are)
        for array, view in zip(given, views, strict=True):
            assert view.shape == array.shape
            assert np.array_equal(view.cpu().numpy(), array)
        assert all(view.data_ptr() % 16 == 0 for view in views if view.numel())
        places.append([view.data_ptr() for view in views])
    assert places == [places[0]] * 4
    assert places[0][0] == places[0][-1]


def as_they_are(views: Views) -> Views:
    return views


def test_the_same_shapes_have_the_same_views_until_many_others_came(gpu: None) -> None:
    """Shapes are those of every place, and where an array comes again is a part of them."""
    staging = DeviceStaging[Views](4999, torch.device("cuda"))
    one, two = np.arange(4, dtype=np.int32), np.ones(4, np.int32)
    known = staging.upload([one, two, one], as_they_are)
    assert staging.upload([two, one, two], as_they_are) is known
    assert [view.tolist() for view in known] == [two.tolist(), one.tolist(), two.tolist()]
    for others in ([one, two, two], [one, two], [one, two.astype(np.float32), one], [one, two[:, None], one]):
        views = staging.upload(others, as_they_are)
        assert views is not known
        assert [view.tolist() for view in views] == [array.tolist() for array in others]
    assert staging.upload([two, one, two], as_they_are, "of another kind") is not known
    assert staging.upload([two, one, two], as_they_are) is known
    for length in range(300):
        staging.upload([np.zeros(length, dtype=np.int32)], as_they_are)
    assert staging.upload([one, two, one], as_they_are)[1].tolist() == two.tolist()
