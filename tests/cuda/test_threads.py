"""The CPU ops' thread pool: calls from several threads, sizes that change in between, more threads than CPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from engine import _runtime, ops


@pytest.fixture(autouse=True)
def same_size_afterwards() -> Iterator[None]:
    before = _runtime.num_threads()
    yield
    _runtime.set_num_threads(before)


def product(weight: ops.LinearWeight, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), weight.out_features), float("nan"))
    ops.linear(out, x, weight)
    return out


@pytest.mark.parametrize("pool_threads", [1, 2, 7])
def test_calls_from_several_threads_do_not_mix(pool_threads: int) -> None:
    _runtime.set_num_threads(pool_threads)
    torch.manual_seed(0)
    cases = [(ops.pack_linear(torch.randn(700, 200)), torch.randn(1 + 3 * index, 200)) for index in range(6)]
    expected = [product(weight, x) for weight, x in cases]
    wrong: list[int] = []

    def work(index: int) -> None:
        weight, x = cases[index]
        wrong.extend(index for _ in range(100) if not torch.equal(product(weight, x), expected[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_size_may_change_while_others_compute() -> None:
    weight, x = ops.pack_linear(torch.randn(700, 200)), torch.randn(9, 200)
    expected, finished, wrong = product(weight, x), threading.Event(), threading.Event()

    def work() -> None:
        while not finished.is_set():
            if not torch.equal(product(weight, x), expected):
                wrong.set()

    thread = threading.Thread(target=work)
    thread.start()
    for count in [1, 4, 2, 1, 3] * 8:
        _runtime.set_num_threads(count)
        assert torch.equal(product(weight, x), expected)
    finished.set()
    thread.join()
    assert not wrong.is_set()
    assert _runtime.num_threads() == 3


def test_threads_sleep_when_there_is_nothing_to_do_and_wake_again() -> None:
    """Past the time that they spin for, a call still finds them."""
    weight, x = ops.pack_linear(torch.randn(700, 200)), torch.randn(9, 200)
    expected = product(weight, x)
    for _ in range(20):
        threading.Event().wait(0.005)
        assert torch.equal(product(weight, x), expected)
