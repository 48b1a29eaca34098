"""Room in a full queue for what is more important: requests of a priority below 0 give way while they wait."""

from __future__ import annotations

from collections.abc import Iterable

from engine.schedule.sequence import RequestGroup, Sequence


def may_give_way(group: RequestGroup) -> bool:
    """To a request of a higher priority: nothing was computed for it yet."""
    return group.request.priority < 0 and group.first_scheduled is None


def giving_way(waiting: Iterable[Sequence], priority: int, requests: int, tokens: int) -> list[RequestGroup]:
    """Who goes so that a request of this priority may wait: the least important, of these the newest. requests, tokens:
    how much room is wanted, of requests and of prompt tokens. Empty if all that may go would not make it."""
    groups = {group.request_id: group for group in (sequence.group for sequence in waiting)}
    low = [group for group in groups.values() if may_give_way(group) and group.request.priority < priority]
    low.sort(key=lambda group: (group.request.priority, -group.order))
    for count, group in enumerate(low, 1):
        requests -= 1
        tokens -= sum(sequence.queued_prompt for sequence in group.sequences)
        if requests <= 0 and tokens <= 0:
            return low[:count]
    return []
