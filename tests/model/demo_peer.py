"""The demo model as transformers reads the same file: its conversion takes a while, so it is done once a test run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import gguf
import torch
import transformers

from engine.model.source import resolve

_reader, _names = cache(gguf.GGUFReader), cache(gguf.get_tensor_name_map)


@contextmanager
def parsed_once() -> Iterator[None]:
    """transformers parses the file anew for a config, a tokenizer and a model, and makes the map of its tensors' names
    anew for each of hundreds of modules."""
    with patch.object(gguf, "GGUFReader", _reader), patch.object(gguf, "get_tensor_name_map", _names):
        yield


@cache
def demo_peer() -> Any:
    """In fp32, with eager attention, and running on through ends of sequence."""
    source = resolve("demo")
    with parsed_once():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(source.path.parent), gguf_file=source.path.name, dtype=torch.float32, attn_implementation="eager"
        )
    model.generation_config.eos_token_id = None
    return model.eval()


@cache
def demo_peer_tokenizer() -> Any:
    source = resolve("demo")
    with parsed_once():
        return transformers.AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
