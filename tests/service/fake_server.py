"""`python -m tests.service.fake_server [PORT [ADMIN_PORT]]`: the real server process over the scripted engine.

A prompt that starts with "slow" gets a token every 20 ms; other requests are as fast as the scripted engine is.
"""

from __future__ import annotations

import sys

from engine import GenerationRequest
from service.config import ServiceConfig
from service.logs import configure_logs
from service.serve import run, serve_engine
from tests.service.byte_tokenizer import byte_tokenizer
from tests.service.fake_engine import FakeEngineClient, Script


def plan(request: GenerationRequest) -> Script:
    return Script(steps_per_token=20) if request.prompt_token_ids[:4] == list(b"slow") else Script()


def main() -> int:
    configure_logs("info")
    engine = FakeEngineClient()
    engine.plan = plan
    port, admin_port = (*map(int, sys.argv[1:]), *([0, 0][len(sys.argv) - 1 :]))
    config = ServiceConfig(port=port, admin_port=admin_port or None)
    return run(lambda: serve_engine(engine, byte_tokenizer(), config))


if __name__ == "__main__":
    sys.exit(main())
