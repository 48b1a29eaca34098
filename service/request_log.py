"""What the log says of a request: one line when it has ended, without its texts."""

from __future__ import annotations

import logging

from engine import Usage
from service.status import Failure


def log_end(
    logger: logging.Logger, engine_id: str, client_id: str, outcome: Failure | str, usage: Usage, seconds: float
) -> None:
    if logger.isEnabledFor(logging.INFO):
        logger.info("request ended", extra=_ending(engine_id, client_id, outcome, usage, seconds))


def _ending(
    engine_id: str, client_id: str, outcome: Failure | str, usage: Usage, seconds: float
) -> dict[str, str | int | float]:
    return {
        "request_id": engine_id,
        "client_request_id": client_id,
        "outcome": outcome.reason if isinstance(outcome, Failure) else outcome,
        "problem": outcome.message if isinstance(outcome, Failure) else "",
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "seconds": round(seconds, 6),
    }
