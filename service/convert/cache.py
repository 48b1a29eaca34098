"""Changes of the prefix cache as messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine import BlockRemoved, BlockStored, CacheChange
from octavo.v1 import capacity_pb2


def snapshot_message(
    instance_id: str, sequence: int, blocks: Sequence[BlockStored], *, first: bool, last: bool
) -> capacity_pb2.WatchCacheEventsResponse:
    events = [capacity_pb2.CacheEvent(cleared=capacity_pb2.CacheCleared())] if first else []
    return capacity_pb2.WatchCacheEventsResponse(
        instance_id=instance_id,
        sequence=sequence,
        events=[*events, *cache_events(blocks)],
        snapshot=True,
        snapshot_end=last,
    )


def changes_message(
    instance_id: str, sequence: int, changes: Sequence[CacheChange]
) -> capacity_pb2.WatchCacheEventsResponse:
    return capacity_pb2.WatchCacheEventsResponse(
        instance_id=instance_id, sequence=sequence, events=cache_events(changes)
    )


def cache_events(changes: Iterable[CacheChange]) -> list[capacity_pb2.CacheEvent]:
    """In order; blocks that follow one another, and removals, go together."""
    events: list[capacity_pb2.CacheEvent] = []
    newest: int | None = None  # the hash of the last block of the event that stores
    for change in changes:
        match change:
            case BlockStored():
                if newest is None or change.parent != newest:
                    stored = capacity_pb2.BlocksStored(parent_hash=change.parent)
                    events.append(capacity_pb2.CacheEvent(stored=stored))
                events[-1].stored.blocks.add(hash=change.hash, token_ids=change.token_ids)
                newest = change.hash
            case BlockRemoved():
                if newest is not None or not events:
                    events.append(capacity_pb2.CacheEvent(removed=capacity_pb2.BlocksRemoved()))
                events[-1].removed.hashes.append(change.hash)
                newest = None
    return events
