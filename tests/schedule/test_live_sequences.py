"""Who waits, arrives and runs, and who of those that hold blocks yields first."""

from __future__ import annotations

from engine.schedule.live_sequences import LiveSequences
from engine.schedule.policy import PriorityWithAgeing
from engine.schedule.sequence import Phase, RequestGroup, Sequence
from tests.schedule.fake_model import request


def sequences(count: int) -> list[Sequence]:
    """In the order of their arrival."""
    groups = [RequestGroup(request(str(order), [1]), order, float(order)) for order in range(count)]
    return [Sequence(group, 0, 0, [1], 9) for group in groups]


def test_the_last_by_the_policy_yields_whether_it_runs_or_arrives() -> None:
    live, (first, second, third, fourth) = LiveSequences(PriorityWithAgeing()), sequences(4)
    live.run(third)
    live.run(first)
    assert live.running == [first, third]
    live.arrive(second, 7)
    assert live.last_resident is third
    live.arrive(fourth, 7)
    assert live.last_resident is fourth
    live.remove(third)
    live.remove(first)
    assert live.last_resident is fourth
    assert (live.resident, live.num_resident) == ([second, fourth], 2)


def test_what_has_been_copied_in_runs() -> None:
    live, (first, second, third) = LiveSequences(PriorityWithAgeing()), sequences(3)
    for step, sequence in enumerate((third, second, first), 5):
        live.arrive(sequence, step)
    live.land(6)
    assert (live.running, live.arriving) == ([second, third], [first])
    assert [sequence.phase for sequence in (first, second, third)] == [Phase.ARRIVING, Phase.RUNNING, Phase.RUNNING]
    live.land(None)
    assert (live.running, live.arriving) == ([first, second, third], [])


def test_requests_of_which_something_is_resident() -> None:
    """A request's candidates count once, from the first that comes to the last that goes."""
    live, (first, second) = LiveSequences(PriorityWithAgeing()), sequences(2)
    sibling = Sequence(first.group, 1, 0, [1], 9)
    live.wait(second)
    assert not live.resident_requests
    live.run(first)
    live.arrive(sibling, 3)
    live.remove(second)
    live.arrive(second, 4)
    assert set(live.resident_requests) == {0, 1}
    live.land(3)
    live.remove(first)
    assert set(live.resident_requests) == {0, 1}
    live.remove(sibling)
    assert set(live.resident_requests) == {1}
    live.remove(second)
    assert not live.resident_requests
