"""The demo model as transformers reads the same file: its conversion takes a while, so it is done once a test run."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from engine.model.source import resolve


@cache
def demo_peer() -> Any:
    """In fp32, with eager attention, and running on through ends of sequence."""
    source = resolve("demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(source.path.parent), gguf_file=source.path.name, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    return model.eval()
