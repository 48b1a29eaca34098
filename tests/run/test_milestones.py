"""A long step on a device shows its progress while it is waited for, and a hanging one none."""

from __future__ import annotations

import pytest

from engine.run.milestones import EVERY, Milestones


class Device:
    """Passes `reaches` events and hangs."""

    def __init__(self, reaches: int) -> None:
        self.left = reaches
        self.recorded = 0

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        if not self.left:
            raise TimeoutError
        self.left -= 1


def test_each_milestone_that_is_passed_is_a_pulse() -> None:
    device, pulses = Device(reaches=2), list[int]()
    milestones = Milestones(lambda: device, lambda: pulses.append(device.left))
    milestones.marking = True
    for _ in range(5 * EVERY):
        milestones.piece()
    events = milestones.take()
    assert (device.recorded, len(events), milestones.take()) == (5, 5, [])
    with pytest.raises(TimeoutError):
        milestones.wait(events)
    assert pulses == [1, 0]


def test_nothing_is_marked_while_a_graph_is_recorded() -> None:
    device = Device(reaches=0)
    milestones = Milestones(lambda: device, lambda: None)
    for _ in range(5 * EVERY):
        milestones.piece()
    assert (device.recorded, milestones.take()) == (0, [])
