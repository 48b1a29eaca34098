"""Masks of many grammars at once, before anything waits for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.run import logits as logits_module
from engine.run import masks as masks_module
from engine.run.logits import redraw
from engine.run.masks import grammar_masks
from engine.schedule.plan import ScheduledSequence
from engine.types import SamplingParameters
from tests.run.test_logits import VOCABULARY, entry, plan_of

WORDS = -(-VOCABULARY // 32)


class OnlyToken:
    """Lets one token come: the last one of the output, plus `step`."""

    error = ""

    def __init__(self, step: int) -> None:
        self._step = step
        self.thread_names: list[str] = []

    def copy(self) -> OnlyToken:
        return OnlyToken(self._step)

    def mask(self, output: Any) -> NDArray[np.int32]:
        bits = np.zeros(32 * WORDS, dtype=np.uint8)
        bits[output[-1] + self._step] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def bound_to(step: int, output: list[int], slot: int = 0) -> ScheduledSequence:
    item = entry([9, 9, 9], output, SamplingParameters(temperature=0.0, logit_bias={0: 0.0}), slot=slot)
    item.sequence.constraint = OnlyToken(step)
    return item


def token_of(mask: NDArray[np.int32]) -> int:
    [token] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(token)


@pytest.mark.parametrize("cores", [1, 2, 64])
@pytest.mark.parametrize("rows", [0, 1, 7, 16, 33, 100])
def test_each_row_gets_its_own_on_any_number_of_threads(rows: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_module.os, "cpu_count", lambda: cores)
    items = []
    for row in range(rows):
        items += [bound_to(row, [5, 7]), entry([1], [2])]
    found = grammar_masks(items)
    assert found[1::2] == [None] * rows
    assert [token_of(mask) for mask in found[::2] if mask is not None] == [7 + row for row in range(rows)]


def test_rows_beyond_one_copy_get_their_own() -> None:
    items = [bound_to(row, [5, 7], slot=row) for row in range(70)]
    tokens = torch.zeros(70, dtype=torch.int32)
    redraw(tokens, torch.zeros(70, VOCABULARY), plan_of(items))
    assert tokens.tolist() == [7 + row for row in range(70)]


def test_the_device_is_not_waited_for_before_the_masks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the logits would wait for the forward pass, beside which the masks are to be computed."""
    order: list[str] = []
    items = [bound_to(row, [5, 7], slot=row) for row in range(40)]
    real = grammar_masks

    def recording(entries: list[ScheduledSequence]) -> Any:
        order.append("masks")
        return real(entries)

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            order.append("device")
            return super().__torch_function__(func, types, args, kwargs or {})

    monkeypatch.setattr(logits_module, "grammar_masks", recording)
    logits = torch.zeros(40, VOCABULARY).as_subclass(Watched)
    order.clear()
    redraw(torch.zeros(40, dtype=torch.int32), logits, plan_of(items))
    assert order[0] == "masks"
    assert order.count("masks") == 1
    assert "device" in order
