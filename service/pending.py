"""What waits for a client, in bytes: roughly what it costs in memory and on the wire."""

from __future__ import annotations

from engine import Tokenizer, TokenLogprob
from service.status import Failure

EVENT_BYTES = 48  # beside the event's text
TOKEN_BYTES = 4
LOGPROB_BYTES = 24


class PendingBytes:
    """Of output that one RPC holds and has not sent. prompts: of these, log probabilities of prompts, which prefill
    makes by the megabyte, however fast their client reads."""

    def __init__(self) -> None:
        self.total = 0
        self.prompts = 0


def logprob_bytes(logprob: TokenLogprob, tokenizer: Tokenizer) -> int:
    """Every one of them carries its token's bytes, of which some vocabularies have hundreds."""
    ids = [logprob.token_id, *[token_id for token_id, _ in logprob.top]]
    return sum([LOGPROB_BYTES + len(tokenizer.token_bytes(token_id)) for token_id in ids])


def refusal_bytes(request_id: str, failure: Failure) -> int:
    size: int = EVENT_BYTES + len(request_id) + failure.status.ByteSize()
    return size
