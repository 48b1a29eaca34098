"""How full a queue is, and the one wording of its being full."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueFill:
    """What waits, in requests and in tokens of their prompts, without those that slots and blocks are free for; and how
    much may."""

    requests: int
    prompt_tokens: int
    max_requests: int
    max_prompt_tokens: int

    def holds(self, own_tokens: int) -> bool:
        """Whether there is room for a request with so many prompt tokens. One that nobody waits before is taken
        whatever its length: a prompt of more than the bound could else never be served."""
        if self.requests >= self.max_requests:
            return False
        return self.prompt_tokens <= 0 or self.prompt_tokens + own_tokens <= self.max_prompt_tokens

    @property
    def numbers(self) -> dict[str, str]:
        """For machines to read."""
        return {
            "waiting_requests": str(self.requests),
            "max_queued_requests": str(self.max_requests),
            "waiting_prompt_tokens": str(self.prompt_tokens),
            "max_queued_tokens": str(self.max_prompt_tokens),
        }

    @property
    def wording(self) -> str:
        """Of the bound that is met first."""
        if self.requests >= self.max_requests:
            return f"{self.requests} of at most {self.max_requests} requests wait"
        return f"{self.prompt_tokens} of at most {self.max_prompt_tokens} prompt tokens wait"
