"""SmolLM2 beside transformers' `generate` in one process: tokens per second at 1 and 16 requests, same tokens."""

from __future__ import annotations

import os
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

from engine import load_tokenizer
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.source import resolve
from engine.types import GenerationRequest, SamplingParameters, StopCriteria

Figures = dict[str, float]

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "To make bread you need flour,",
    "The three laws of motion say that",
)
NEW_TOKENS = {1: 48, 16: 24}
ROUNDS = 3


def prompts(count: int) -> list[list[int]]:
    """`count` prompts of one length, so that transformers needs no padding."""
    tokenizer = load_tokenizer("demo")
    encoded = [tokenizer.encode(f"{index}. {PROMPTS[index % len(PROMPTS)]}") for index in range(count)]
    length = min(len(ids) for ids in encoded)
    return [ids[:length] for ids in encoded]


def run_engine(engine: Engine, inputs: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds and tokens of a batch run to its end, greedily, ignoring end-of-sequence."""
    requests = [
        GenerationRequest(
            str(index),
            ids,
            SamplingParameters(temperature=0.0),
            StopCriteria(max_tokens=new_tokens, ignore_eos=True),
        )
        for index, ids in enumerate(inputs)
    ]
    begin = time.perf_counter()
    results = engine.generate(requests)
    return time.perf_counter() - begin, [result.token_ids for result in results]


def run_transformers(model: torch.nn.Module, inputs: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    ids = torch.tensor(inputs)
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the engine, which has threads of its own, leaves torch one
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - begin
    torch.set_num_threads(1)
    return seconds, out[:, ids.shape[1] :].tolist()


def measure() -> Figures:
    """Rounds of both, interleaved; medians; raises if the tokens differ."""
    source = resolve("demo")
    peer = AutoModelForCausalLM.from_pretrained(
        str(source.path.parent), gguf_file=source.path.name, dtype=torch.float32
    ).eval()
    peer.generation_config.eos_token_id = None  # both run on through an end of sequence
    engine = Engine(EngineConfig(max_num_seqs=16, max_model_len=1024))
    figures: Figures = {}
    for count, new_tokens in NEW_TOKENS.items():
        inputs = prompts(count)
        run_engine(engine, inputs, 4)
        run_transformers(peer, inputs, 4)
        ours, theirs = [], []
        for _ in range(ROUNDS):
            seconds, tokens = run_engine(engine, inputs, new_tokens)
            peer_seconds, peer_tokens = run_transformers(peer, inputs, new_tokens)
            if tokens != peer_tokens:
                raise AssertionError(f"tokens differ from transformers at {count} requests")
            ours.append(count * new_tokens / seconds)
            theirs.append(count * new_tokens / peer_seconds)
        figures[f"tokens_per_second_b{count}"] = statistics.median(ours)
        figures[f"hf_tokens_per_second_b{count}"] = statistics.median(theirs)
        figures[f"hf_ratio_b{count}"] = statistics.median(ours) / statistics.median(theirs)
    return figures
