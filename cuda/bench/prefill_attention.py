"""Prefill attention: microseconds a layer against the tensor cores and against torch's SDPA on dense copies. The plan,
one for all layers of a step, is not in them.

python cuda/bench/prefill_attention.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decode_attention import BLOCK, HEADS
from stopwatch import captured, machine, matmul_rate, microseconds

from engine import ops

CELLS = [
    *[(model, 1, 2048, 0) for model in HEADS],
    *[(model, 16, 2048, 0) for model in ("qwen2.5", "qwen3")],
    ("qwen2.5", 1, 8192, 0),
    ("qwen3", 1, 8192, 0),
    ("qwen2.5", 1, 2048, 6144),
    ("qwen2.5", 1, 64, 8128),
]


def measure(model: str, batch: int, queries: int, cached: int, flops: float) -> dict[str, float | str]:
    q_heads, kv_heads, head_dim, _ = HEADS[model]
    context = queries + cached
    blocks = -(-context // BLOCK)
    pool = torch.randn(batch * blocks + 1, 1, 2, kv_heads, BLOCK, head_dim, device="cuda").bfloat16()
    tables = (1 + torch.randperm(batch * blocks).int()).view(batch, blocks).cuda()
    query = torch.randn(batch * queries, q_heads, head_dim, device="cuda").bfloat16()
    out = torch.empty_like(query)
    start = torch.arange(batch + 1, device="cuda").int() * queries
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    scale = head_dim**-0.5
    workspace_bytes = ops.paged_attention_workspace_bytes(batch, q_heads, kv_heads, head_dim)
    workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device="cuda")
    ops.plan_prefill(start, lens, q_heads, kv_heads, head_dim, workspace)  # once a step: not timed

    def ours() -> None:
        ops.paged_attention(
            out,
            query,
            pool,
            0,
            tables,
            start,
            lens,
            max_query_len=queries,
            scale=scale,
            workspace=workspace,
            planned=True,
        )

    kv = pool[tables.long(), 0].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[..., :context, :].contiguous()
    keys, values = (x.repeat_interleave(q_heads // kv_heads, dim=1) for x in kv)
    dense = query.view(batch, queries, q_heads, head_dim).transpose(1, 2).contiguous()
    steps = {"ours": ours}
    results: dict[str, torch.Tensor] = {}
    if cached == 0:
        for name, backend in {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}.items():

            def peer(backend: SDPBackend = backend, name: str = name) -> None:
                with sdpa_kernel(backend):
                    results[name] = torch.nn.functional.scaled_dot_product_attention(
                        dense, keys, values, is_causal=True, scale=scale
                    )

            steps[name] = peer
    times = microseconds([captured(step) for step in steps.values()])
    ours()
    for name, result in results.items():
        theirs = result.transpose(1, 2).reshape_as(out).float()
        error = float((out.float() - theirs).norm() / theirs.norm())
        if not error < 1e-2:
            raise SystemExit(f"{model}: {name} differs from ours by {error}")
    work = 4 * q_heads * head_dim * batch * (queries * cached + queries * (queries + 1) / 2)
    row: dict[str, float | str] = {"cell": f"{model}:{batch}x{queries}+{cached}", "floor": work / flops * 1e6}
    row |= dict(zip(steps, times, strict=True))
    return row | {"TFLOP/s": work / times[0] / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    flops = matmul_rate()
    print(f"prefill attention, us a layer; {machine()}; matmul {flops / 1e12:.0f} TFLOP/s")
    rows = []
    for cell in CELLS:
        rows.append(measure(*cell, flops))
        shown = " ".join(f"{name} {value:9.1f}" for name, value in rows[-1].items() if isinstance(value, float))
        print(f"{rows[-1]['cell']:22s} {shown}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "matmul": flops, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
