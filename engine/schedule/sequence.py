"""A request's candidates as the scheduler sees them."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.kv.prefix_index import Chain
from engine.schedule.token_counts import TokenCounts
from engine.types import CandidateFinish, GenerationRequest, Timing, Usage

NO_SLOT = -1
_ALL_TOKENS = 2**31 - 1


class Constraint(Protocol):
    """Which tokens may come next in one candidate."""

    def copy(self) -> Constraint: ...

    @property
    def error(self) -> str:
        """Why nothing may come any more; empty if all is well."""
        ...

    def mask(self, output: Tokens[int]) -> NDArray[np.int32]:
        """32 tokens a word, lowest bit first, after all of `output`, which only grows."""
        ...


class Phase(enum.Enum):
    WAITING = enum.auto()  # not started, or preempted
    ARRIVING = enum.auto()  # holds a slot and blocks, whose contents are on their way from host memory
    RUNNING = enum.auto()  # holds a slot and blocks
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One candidate: its tokens and how far the model has computed them.

    `num_pending` counts sampled tokens whose values are still on the device (0 or 1); `num_computed` counts tokens
    whose K and V are in the cache once every launched step has run. So a plan may be made while the step before it
    runs.
    """

    group: RequestGroup
    candidate: int
    seed: int
    token_ids: list[int]
    max_tokens_total: int  # prompt + output at which the candidate ends by length
    phase: Phase = Phase.WAITING
    slot: int = NO_SLOT
    capacity: int = 0  # tokens that the blocks of its row have room for
    num_computed: int = 0
    num_pending: int = 0
    preemptions: int = 0
    skips: int = 0  # how often a later sequence was admitted before this one for want of blocks
    swapped_blocks: list[int] = field(default_factory=list)  # host blocks that hold the first `num_computed` tokens
    arrival_step: int = 0  # while arriving: the step whose moves bring it back
    shared_tokens: int = 0  # while it runs: of its tokens, those whose blocks others computed when it was admitted
    chain: Chain | None = None  # how far its blocks are published in the prefix cache; None: not at all, ever
    finish: CandidateFinish | None = None
    counts: TokenCounts | None = None  # made when a penalty first asks for it
    constraint: Constraint | None = None
    shares_prompt: bool = False  # with the request's first candidate, who computes it
    num_prompt: int = field(init=False)  # asked for every sequence and step

    def __post_init__(self) -> None:
        self.num_prompt = len(self.group.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def awaits_first_turn(self) -> bool:
        """Has not run yet. Of one that was preempted something may be found where it was left."""
        return self.phase is Phase.WAITING and not self.preemptions

    @property
    def queued_prompt(self) -> int:
        """Tokens of its prompt that it adds to a queue: candidates that share one count it once."""
        return 0 if self.shares_prompt else self.num_prompt

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A request with its candidates, and what its last event will tell."""

    request: GenerationRequest
    order: int  # arrival number
    arrival: float  # time.monotonic()
    sequences: list[Sequence] = field(default_factory=list)
    first_scheduled: float | None = None
    first_token: float | None = None
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    ending_ids: frozenset[int] = frozenset()  # both
    cached_prompt_tokens: int = 0
    edited_tokens: int = 0  # so many first tokens of the output are drawn from logits that the request changes
    scored_tokens: int = 1  # of the prompt, those with a log probability; the first has none
    follows_tokens: bool = False  # how they change depends on the tokens so far, so a step must wait for the last one's
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt are wanted and not all there. The first candidate computes them."""
        request = self.request
        return request.prompt_top_logprobs is not None and self.scored_tokens < len(request.prompt_token_ids)

    @property
    def done(self) -> bool:
        return all(sequence.phase is Phase.FINISHED for sequence in self.sequences)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_prompt_tokens=self.cached_prompt_tokens,
            completion_tokens=sum(sequence.num_generated for sequence in self.sequences),
        )

    def timing(self, now: float) -> Timing:
        return Timing(
            queued=(self.first_scheduled or now) - self.arrival,
            time_to_first_token=(self.first_token or now) - self.arrival,
            total=now - self.arrival,
            preemptions=sum(sequence.preemptions for sequence in self.sequences),
        )


def follows_tokens(request: GenerationRequest) -> bool:
    """Whether what may be drawn next depends on the tokens so far."""
    sampling = request.sampling
    if request.grammar is not None:
        return True
    return sampling.repetition_penalty != 1.0 or bool(sampling.presence_penalty or sampling.frequency_penalty)


def edited_tokens(request: GenerationRequest, ending_ids: frozenset[int]) -> int:
    """How many of the output's first tokens are drawn from logits that the request changes."""
    if follows_tokens(request) or request.sampling.logit_bias or request.sampling.allowed_token_ids:
        return _ALL_TOKENS
    return request.stop.min_tokens if ending_ids else 0
