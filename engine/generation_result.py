"""What came of a request that was run to its end: for work without a service."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.types import (
    CandidateFinish,
    Event,
    PromptScored,
    RequestFailed,
    RequestFinished,
    TokenLogprob,
    TokensGenerated,
    Usage,
)


@dataclass(slots=True)
class GeneratedCandidate:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: CandidateFinish | None = None


@dataclass(slots=True)
class GenerationResult:
    """What `Engine.generate` gives for one request. `failure` is set if it failed."""

    request_id: str
    candidates: list[GeneratedCandidate]
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the prompt's second token on
    failure: RequestFailed | None = None

    @property
    def token_ids(self) -> list[int]:
        """Of the first candidate."""
        return self.candidates[0].token_ids

    def add(self, event: Event) -> None:
        """Takes in the request's next event."""
        match event:
            case TokensGenerated():
                candidate = self.candidates[event.candidate]
                candidate.token_ids += event.token_ids
                candidate.logprobs += event.logprobs
                candidate.finish = event.finish
            case PromptScored():
                self.prompt_logprobs += event.logprobs
            case RequestFinished():
                self.usage = event.usage
            case RequestFailed():
                self.failure = event
                self.usage = event.usage
            case _:
                pass
