"""Builds a tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.errors import ConfigurationError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_LLAMA3_SPLIT = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises ConfigurationError if the vocabulary is missing or of an unknown kind."""
    model = metadata.get("tokenizer.ggml.model")
    if not metadata.get("tokenizer.ggml.tokens"):
        raise ConfigurationError("no tokenizer in the GGUF metadata (tokenizer.ggml.tokens)")
    if model == "gpt2":
        tokenizer = _byte_level(metadata)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ConfigurationError(f"GGUF tokenizer {model!r} is not supported (gpt2 and llama are)")
    _add_tokens(tokenizer, metadata)
    _add_post_processor(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [_merge(line) for line in metadata.get("tokenizer.ggml.merges", ())]
    kind = metadata.get("tokenizer.ggml.pre", "default")
    splitters = _splitters(kind)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe"))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right


def _splitters(kind: str) -> list[Any]:
    """How text is cut before merging; the merges were learnt on text cut that way."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match kind:
        case "gpt-2" | "default":
            return [plain]
        case "smollm":
            return [pre_tokenizers.Digits(individual_digits=True), plain]
        case "llama-bpe":
            return [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), bytes_only]
        case "qwen2":
            return [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), bytes_only]
        case _:
            raise ConfigurationError(
                f"GGUF pre-tokenizer {kind!r} is not supported (smollm, llama-bpe, qwen2, gpt-2 are)"
            )


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ConfigurationError("a llama tokenizer in GGUF needs a score for each token (tokenizer.ggml.scores)")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = BPE(
        vocabulary,
        _merges_by_score(tokens, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best. As a merge list: all splits of all tokens, best first."""
    score_of = dict(zip(tokens, scores, strict=True))
    merges: list[tuple[float, str, str]] = []
    for token, score in score_of.items():
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in score_of and pair[1] in score_of]
        known.sort(key=lambda pair: (score_of[pair[0]], score_of[pair[1]]), reverse=True)
        merges += [(score, left, right) for left, right in known]
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [(left, right) for _, left, right in merges]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    special = [token for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _UNKNOWN)]
    defined = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _add_post_processor(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    starts_by_default = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    first = metadata.get("tokenizer.ggml.bos_token_id")
    last = metadata.get("tokenizer.ggml.eos_token_id")
    add_first = metadata.get("tokenizer.ggml.add_bos_token", starts_by_default) and first is not None
    add_last = metadata.get("tokenizer.ggml.add_eos_token", False) and last is not None
    _add_special_ends(tokenizer, first if add_first else None, last if add_last else None)


def _add_special_ends(tokenizer: Tokenizer, first: int | None, last: int | None) -> None:
    """Makes `encode` put these ids before and after a text."""
    tokens = [(tokenizer.id_to_token(item), item) for item in (first, last) if item is not None]
    start = [] if first is None else [tokenizer.id_to_token(first)]
    end = [] if last is None else [tokenizer.id_to_token(last)]
    if tokens:
        template = [*start, "$A", *end]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
