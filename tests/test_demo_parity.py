"""The demo model, whole and in fp32, against transformers' own reading of the same file."""

from __future__ import annotations

import pytest
import torch

from engine import load_tokenizer
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.loader import load_model
from engine.types import GenerationRequest
from tests.model.demo_peer import demo_peer
from tests.model.paged_loop import greedy
from tests.model.test_parity import assert_equal_to as assert_logits_equal
from tests.test_engine import GREEDY, request
from tests.test_engine_logprobs import TOP, all_scores, assert_equal_to, scores_by, scoring
from tests.text.corpus import PROMPTS

pytestmark = pytest.mark.slow


def test_logits_of_a_chat() -> None:
    config = EngineConfig(model="demo", max_num_batched_tokens=128, max_num_seqs=64)
    loaded = load_model(config, torch.device("cpu"))
    prompt, _ = load_tokenizer("demo").encode_chat([{"role": "user", "content": "What is an octavo?"}])
    assert_logits_equal(demo_peer(), loaded.decoder, prompt, greedy(loaded.decoder, prompt, 60, chunk=16), atol=2e-3)


def test_log_probabilities() -> None:
    """Prompts and outputs, in chunks beside each other, then with the prompts in the cache."""
    peer = demo_peer()
    tokenizer = load_tokenizer("demo")
    demo = Engine(EngineConfig(max_num_seqs=4, max_model_len=512, max_num_batched_tokens=24))
    prompts = [tokenizer.encode(PROMPTS[script] + " " + PROMPTS["Latn"]) for script in ("Latn", "Grek", "Hans")]
    results = demo.generate([scoring(str(index), prompt, 24) for index, prompt in enumerate(prompts)])
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        tokens = prompt + result.token_ids
        expected = scores_by(peer, tokens)
        assert_equal_to(expected, tokens[1:], all_scores(result))
        plain = GenerationRequest("hit", prompt, GREEDY, scoring(str(index), prompt, 24).stop, top_logprobs=TOP)
        hit = demo.generate([plain])[0]
        assert hit.usage.cached_prompt_tokens >= 16
        assert_equal_to(expected[len(prompt) - 1 :], hit.token_ids, hit.candidates[0].logprobs)


def test_two_hundred_tokens() -> None:
    """Greedy, three prompts at once."""
    peer = demo_peer()
    tokenizer = load_tokenizer("demo")
    texts = ("The capital of France is", "Once upon a time, in a small village by the sea,", "To make bread you need")
    prompts = [tokenizer.encode(text) for text in texts]
    demo = Engine(EngineConfig(max_num_seqs=4, max_model_len=512))
    results = demo.generate([request(str(index), prompt, 200) for index, prompt in enumerate(prompts)])
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.token_ids) == 200
        with torch.inference_mode():
            logits = peer(torch.tensor([prompt + result.token_ids])).logits[0]
        # What the peer would choose after each of them, had it chosen all before.
        assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == result.token_ids
