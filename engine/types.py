"""What crosses the engine's boundary: requests in, events out. Plain values, encodable by msgspec, no torch.

Events are arrays on the wire and invisible to the garbage collector: a step makes one for every token.
"""

from __future__ import annotations

import enum

import msgspec


class FinishReason(enum.IntEnum):
    """Why a candidate ended. Values equal `octavo.v1.FinishReason` (a test compares them)."""

    END_OF_SEQUENCE = 1
    STOP = 2
    MAX_TOKENS = 3
    CONTEXT_LIMIT = 4
    CANCELLED = 5


class SamplingParameters(msgspec.Struct, frozen=True):
    """How the next token is drawn. Defaults change nothing: they sample from the model's own distribution.

    temperature: 0 is greedy; values below 1e-5 count as 0. top_k: 0 disables; top_p and min_p are probabilities.
    repetition_penalty: over prompt and output, as Hugging Face has it; presence_penalty, frequency_penalty: over the
    output, as OpenAI has them. logit_bias: added to the model's logits, before anything else. allowed_token_ids: empty
    allows all.
    seed: 64 bits, unsigned; makes the output reproducible whatever it is batched with; None draws one at admission.
    n: candidates of one prompt, each with its own seed derived from `seed` and its index.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []


class StopCriteria(msgspec.Struct, frozen=True):
    """When a candidate ends, in token ids. Stop strings are matched outside the step loop (engine.text).

    max_tokens: None runs to the context limit. min_tokens: so many tokens come before one that ends the output may.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    token_ids: list[int] = []
    ignore_eos: bool = False


class GrammarKind(enum.StrEnum):
    """What a grammar's text is. regex: the whole output matches it (Rust's syntax, no look-around). ebnf: Lark or GBNF.
    choices: a JSON list of strings. json_object: the text is not read."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICES = "choices"


class Grammar(msgspec.Struct, frozen=True):
    """What an output must follow. JSON comes on one line, with a space behind a comma and a colon."""

    kind: GrammarKind
    text: str = ""


class GenerationRequest(msgspec.Struct, frozen=True):
    """One prompt to continue. `request_id` is unique among the engine's live requests.

    top_logprobs: None: no log probabilities; 0: the sampled token's only; k: also those of the k likeliest.
    prompt_top_logprobs: the same of the prompt's tokens; such a request computes its whole prompt and reads nothing
    from the prefix cache.
    grammar: None leaves the output free. It ends where the grammar is satisfied, so `ignore_eos` and `min_tokens` do
    not go with it.
    deadline, queue_deadline: `time.monotonic()` seconds, for the whole request and for its first scheduling.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParameters = SamplingParameters()
    stop: StopCriteria = StopCriteria()
    top_logprobs: int | None = None
    prompt_top_logprobs: int | None = None
    grammar: Grammar | None = None
    priority: int = 0
    deadline: float | None = None
    queue_deadline: float | None = None
    cache_salt: str = ""
    cache_bypass: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probability of one token and of the likeliest alternatives, as (token id, log probability) pairs."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0


class Timing(msgspec.Struct, frozen=True):
    """Seconds from the engine's receipt of the request; `preemptions` is a count."""

    queued: float = 0.0
    time_to_first_token: float = 0.0
    total: float = 0.0
    preemptions: int = 0


class CandidateFinish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    reason: FinishReason
    token_id: int | None = None  # the end-of-sequence or stop token that matched


class Admitted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="admitted"):
    """First event of every accepted request."""

    request_id: str
    prompt_tokens: int
    queue_position: int


class Scheduled(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="scheduled"):
    """A request's first turn, from which on its queue deadline does not bind it. Only of requests that have one."""

    request_id: str


class PromptScored(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="prompt"):
    """Log probabilities of the next tokens of the prompt, the first of which has none: from the second on, in order, in
    as many events as it takes, all before the request's first TokensGenerated."""

    request_id: str
    logprobs: list[TokenLogprob]


class TokensGenerated(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="tokens"):
    """Tokens of one candidate from one step. `finish` is set in the candidate's last event."""

    request_id: str
    candidate: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] = []
    finish: CandidateFinish | None = None


class RequestFinished(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="finished"):
    """Last event of a request that ended normally or was cancelled."""

    request_id: str
    usage: Usage
    timing: Timing
    cancelled: bool = False


class FailureKind(enum.StrEnum):
    """Why a request failed inside the engine; the service maps each to a status in one table."""

    INVALID = "invalid"
    PROMPT_TOO_LONG = "prompt_too_long"
    GRAMMAR_INVALID = "grammar_invalid"
    QUEUE_FULL = "queue_full"
    DEADLINE_UNATTAINABLE = "deadline_unattainable"
    SHED = "shed"
    EXPIRED_IN_QUEUE = "expired_in_queue"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    DRAINING = "draining"
    DRAIN_TIMEOUT = "drain_timeout"
    ENGINE_ERROR = "engine_error"
    ENGINE_DIED = "engine_died"


class RequestFailed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="failed"):
    """Last event of a request that failed. `field` is set for INVALID."""

    request_id: str
    kind: FailureKind
    message: str
    usage: Usage = Usage()
    field: str = ""
    details: dict[str, str] = {}


Event = Admitted | Scheduled | PromptScored | TokensGenerated | RequestFinished | RequestFailed


class EngineInfo(msgspec.Struct, frozen=True):
    """Facts of a started engine that do not change while it lives."""

    instance_id: str
    model: str
    device: str
    dtype: str
    vocab_size: int
    max_context_tokens: int
    max_prompt_tokens: int
    max_num_seqs: int
    max_queued_requests: int
    max_queued_tokens: int
    block_size: int
    num_blocks: int  # usable blocks, without the scratch block
    eos_token_ids: list[int] = []

    @property
    def kv_cache_tokens(self) -> int:
        return self.num_blocks * self.block_size


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot after a step. Counters are totals since start.

    heartbeat, progressed: `time.monotonic()` seconds of the engine's newest sign of life, and of when its work last
    advanced by a step or a part of one, which is the same while there is no work. A loop that goes round without
    getting anywhere has a heartbeat and no progress. queued_uncached_tokens: of the prompts that wait, what will have
    to be computed if as much of them is found in the prefix cache as of those before them. queue_delay_seconds: what a
    request that comes now waits for its turn, estimated a few times a second; least_delay_seconds: the same without
    any guess at how long outputs are. starting_requests, starting_prompt_tokens: of those queued, what slots and blocks
    are free for; the queue's bounds are for the others. least_priority: of those that wait and would give way to a
    higher one; 0 if none would.
    """

    step: int = 0
    heartbeat: float = 0.0
    progressed: float = 0.0
    running_requests: int = 0
    queued_requests: int = 0
    queued_prompt_tokens: int = 0
    queued_uncached_tokens: int = 0
    starting_requests: int = 0
    starting_prompt_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    live_blocks: int = 0
    swapped_blocks: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished_requests: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    last_step_seconds: float = 0.0
    queue_delay_seconds: float = 0.0
    least_delay_seconds: float = 0.0
    integrity_errors: int = 0
    least_priority: int = 0


class BlockStored(msgspec.Struct, frozen=True, tag="stored"):
    """A block became findable in the prefix cache. hash: of its tokens and all before them, 64 bits, unsigned. parent:
    the hash of the block before, None of a first one."""

    hash: int
    parent: int | None
    token_ids: list[int]


class BlockRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """A block was evicted."""

    hash: int


CacheChange = BlockStored | BlockRemoved


class CachePiece(msgspec.Struct, frozen=True):
    """Part of what the prefix cache holds, as of the frame that it came with. start: as asked for. next_start: where to
    read on, None at the end."""

    start: int
    blocks: list[BlockStored]
    next_start: int | None


class StepFrame(msgspec.Struct, frozen=True):
    """Everything that one engine step made known: one message between processes. cache_changes: of the prefix cache
    since the last frame, in order, once somebody has read from it."""

    events: list[Event]
    stats: EngineStats
    cache_changes: list[CacheChange] = []
    cache_pieces: list[CachePiece] = []
