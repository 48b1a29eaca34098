"""Requests from their admission to their end."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator

from engine.schedule.candidate_seed import candidate_seed
from engine.schedule.plan import ScheduledSequence
from engine.schedule.sequence import Constraint, RequestGroup, Sequence, edited_tokens, follows_tokens
from engine.types import GenerationRequest


class LiveRequests:
    """By id, in the order of their arrival, with what a plan must know of any of them."""

    def __init__(self, max_context_tokens: int, eos_token_ids: frozenset[int], *, shares: bool) -> None:
        """shares: whether a request's candidates share the blocks of its prompt."""
        self._max_context_tokens = max_context_tokens
        self._eos_token_ids = eos_token_ids
        self._shares = shares
        self._groups: dict[str, RequestGroup] = {}
        self._editing: set[str] = set()  # those that change logits before a draw
        self._scoring: set[str] = set()  # those that want log probabilities of their prompts
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def __iter__(self) -> Iterator[RequestGroup]:
        return iter(self._groups.values())

    def get(self, request_id: str) -> RequestGroup | None:
        return self._groups.get(request_id)

    def add(self, request: GenerationRequest, now: float, constraint: Constraint | None) -> RequestGroup:
        """The request with its candidates. constraint: of its grammar."""
        group = RequestGroup(
            request=request,
            order=self._arrivals,
            arrival=now,
            stop_ids=frozenset(request.stop.token_ids),
            eos_ids=frozenset() if request.stop.ignore_eos else self._eos_token_ids,
        )
        group.ending_ids = group.stop_ids | group.eos_ids
        group.edited_tokens = edited_tokens(request, group.ending_ids)
        group.follows_tokens = follows_tokens(request)
        group.sequences = [self._candidate(group, index) for index in range(request.sampling.n)]
        if constraint is not None:
            for sequence in group.sequences:
                sequence.constraint = constraint.copy()
        self._arrivals += 1
        self._groups[request.request_id] = group
        if group.edited_tokens:
            self._editing.add(request.request_id)
        if group.scores_prompt:
            self._scoring.add(request.request_id)
        return group

    def _candidate(self, group: RequestGroup, index: int) -> Sequence:
        request, limit = group.request, self._max_context_tokens
        prompt, max_tokens, seed = len(request.prompt_token_ids), request.stop.max_tokens, request.sampling.seed
        return Sequence(
            group=group,
            candidate=index,
            seed=secrets.randbits(64) if seed is None else candidate_seed(seed, index),
            token_ids=list(request.prompt_token_ids),
            max_tokens_total=limit if max_tokens is None else min(limit, prompt + max_tokens),
            shares_prompt=self._shares and index > 0,
        )

    def forget(self, group: RequestGroup) -> None:
        del self._groups[group.request_id]
        self._editing.discard(group.request_id)
        self._scoring.discard(group.request_id)

    def await_tokens(self, running: Iterable[Sequence]) -> bool:
        """Whether one of these sequences needs the tokens of the last step before the next one is launched."""
        return bool(self._editing) and any(sequence.group.follows_tokens for sequence in running)

    def edited(self, sampling: list[ScheduledSequence]) -> list[int]:
        """Indices of those whose requests change their logits before the draw."""
        if not self._editing:
            return []
        return [
            row
            for row, entry in enumerate(sampling)
            if entry.start + entry.count - entry.sequence.num_prompt < entry.sequence.group.edited_tokens
        ]

    def scored(self, scheduled: list[ScheduledSequence]) -> list[int]:
        """Indices of those that want the log probabilities of prompt tokens behind theirs."""
        if not self._scoring:
            return []
        return [
            index
            for index, entry in enumerate(scheduled)
            if entry.sequence.candidate == 0
            and entry.start + 1 < entry.sequence.num_prompt
            and entry.sequence.group.scores_prompt
        ]

    def take_scores(self, group: RequestGroup, count: int) -> None:
        """So many more tokens of its prompt have their log probabilities."""
        group.scored_tokens += count
        if not group.scores_prompt:
            self._scoring.discard(group.request_id)
