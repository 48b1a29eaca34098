"""Sampling parameters, both ways: validated on their way in, echoed with their defaults on their way out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from engine import EngineInfo, SamplingParameters
from octavo.v1 import generation_pb2
from service.convert.fields import check_id, check_ids, count, number, refuse
from service.status import invalid

MAX_CANDIDATES = 16
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 100.0


def parse_sampling(message: generation_pb2.SamplingParameters, info: EngineInfo) -> SamplingParameters:
    path = "start.sampling"
    top_k = message.top_k
    if top_k > info.vocab_size:
        problem = f"is {top_k}, above the vocabulary size {info.vocab_size}"
        raise refuse(invalid(f"{path}.top_k", problem))
    allowed = list(message.allowed_token_ids)
    check_ids(f"{path}.allowed_token_ids", allowed, info)
    return SamplingParameters(
        temperature=number(message, "temperature", 1.0, path, least=0.0),
        top_p=number(message, "top_p", 1.0, path, above=0.0, most=1.0),
        top_k=top_k,
        min_p=number(message, "min_p", 0.0, path, least=0.0, most=1.0),
        repetition_penalty=number(message, "repetition_penalty", 1.0, path, above=0.0, most=MAX_PENALTY),
        presence_penalty=number(message, "presence_penalty", 0.0, path, least=-2.0, most=2.0),
        frequency_penalty=number(message, "frequency_penalty", 0.0, path, least=-2.0, most=2.0),
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        n=count(message, "n", 1, path, least=1, most=min(MAX_CANDIDATES, info.max_num_seqs)),
        logit_bias=_parse_logit_bias(message.logit_bias, f"{path}.logit_bias", info),
        allowed_token_ids=allowed,
    )


def _parse_logit_bias(biases: Mapping[int, float], path: str, info: EngineInfo) -> dict[int, float]:
    for token_id, bias in biases.items():
        check_id(f"{path}[{token_id}]", token_id, info)
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:  # NaN is not, either
            problem = f"is {bias:g}, not within -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            raise refuse(invalid(f"{path}[{token_id}]", problem))
    return dict(biases)


def sampling_message(sampling: SamplingParameters) -> generation_pb2.SamplingParameters:
    return generation_pb2.SamplingParameters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        n=sampling.n,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
    )
