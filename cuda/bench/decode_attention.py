"""Decode attention: microseconds a layer against the bus and against peers, in one process, replays interleaved.

    python cuda/bench/decode_attention.py [--cells qwen2.5:64x2048,...] [--json FILE]

Every layer of every timed graph reads KV that has left the L2 since it was last read; block tables are random
permutations. Peers read the same pool through strided views; their plans are made outside the timing, ours is inside.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flash_attention_peer import FlashAttentionDecode, flash_attention_present
from flashinfer_peer import FlashInferDecode, flashinfer_version
from stopwatch import COLD_BYTES, captured, copy_rate, machine, microseconds

from engine import ops

BLOCK = 16
MAX_POOL_BYTES = 64e9
HEADS = {"qwen2.5": (12, 2, 128, 28), "qwen3": (16, 8, 128, 28), "smollm2": (9, 3, 64, 30)}
CELLS = [
    f"{model}:{batch}x{context}" for model in HEADS for batch in (1, 8, 32, 64) for context in (1024, 4096, 16384)
] + [
    *[f"qwen2.5:{cell}" for cell in ("32x2048", "64x2048", "64ragged8000")],
    *["qwen3:32x2048", "qwen3:64ragged8000", "smollm2:64ragged8000"],
]


def lengths(cell: str) -> list[int]:
    """ "8x1024": eight of 1024 tokens; "64ragged8000": 64 of 100 to 8000."""
    if "ragged" in cell:
        batch, longest = (int(part) for part in cell.split("ragged"))
        generator = torch.Generator().manual_seed(5)
        return torch.randint(100, longest + 1, (batch,), generator=generator).tolist()
    batch, length = (int(part) for part in cell.split("x"))
    return [length] * batch


@dataclass
class Case:
    """A pool of random numbers and `sets` of block tables over it, walked through layer by layer."""

    heads: tuple[int, int, int]
    layers: int
    contexts: list[int]
    pool: torch.Tensor
    tables: list[torch.Tensor]
    query: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def make(cls, model: str, contexts: list[int]) -> Case:
        q_heads, kv_heads, head_dim, layers = HEADS[model]
        blocks = [-(-context // BLOCK) for context in contexts]
        block_bytes = 2 * kv_heads * BLOCK * head_dim * 2
        while layers > 1 and sum(blocks) * block_bytes * layers > MAX_POOL_BYTES:
            layers = layers // 2
        sets = max(1, min(16, round(COLD_BYTES / (sum(blocks) * block_bytes * layers) + 0.5)))
        count = sets * sum(blocks) + 1
        pool = torch.empty(count, layers, 2, kv_heads, BLOCK, head_dim, dtype=torch.bfloat16, device="cuda")
        for part in pool.split(max(1, int(2e9 / (block_bytes * layers)))):
            part.normal_()
        ids = 1 + torch.randperm(count - 1).int()
        tables = []
        for index in range(sets):
            table = torch.zeros(len(contexts), max(blocks), dtype=torch.int32)
            first = index * sum(blocks)
            for seq, own in enumerate(blocks):
                table[seq, :own] = ids[first : first + own]
                first += own
            tables.append(table.cuda())
        query = torch.randn(len(contexts), q_heads, head_dim, device="cuda").bfloat16()
        lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
        return cls((q_heads, kv_heads, head_dim), layers, contexts, pool, tables, query, lens)

    @property
    def calls(self) -> int:
        return self.layers * len(self.tables)

    @property
    def kv_bytes(self) -> int:
        """Of one layer."""
        return sum(self.contexts) * 2 * self.heads[1] * self.heads[2] * 2


class Ours:
    """write: None: attention on finished queries; "kernel": write_kv in front of it; "fused": decode_attention."""

    def __init__(self, case: Case, *, pdl: bool, least_tokens: int = 0, write: str | None = None) -> None:
        self.case, self.pdl, self.least_tokens, self.write = case, pdl, least_tokens, write
        q_heads, kv_heads, head_dim = case.heads
        batch = len(case.contexts)
        size = ops.paged_attention_workspace_bytes(batch, q_heads, kv_heads, head_dim)
        self.workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self.out = torch.empty_like(case.query)
        self.start = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        self.qkv = torch.randn(batch, (q_heads + 2 * kv_heads) * head_dim, device="cuda").bfloat16()
        self.positions = case.lens - 1
        self.cos_sin = torch.rand(max(case.contexts), head_dim, device="cuda")
        last = (self.positions // BLOCK).long()[:, None]
        self.slots = [table.gather(1, last)[:, 0].long() * BLOCK + self.positions % BLOCK for table in case.tables]

    def step(self) -> None:
        case = self.case
        q_heads, kv_heads, head_dim = case.heads
        ops.plan_attention(case.lens, q_heads, kv_heads, head_dim, self.workspace, least_tokens=self.least_tokens)
        for table, slots in zip(case.tables, self.slots, strict=True):
            for layer in range(case.layers):
                if self.write == "fused":
                    self.attend_fused(table, layer)
                    continue
                if self.write == "kernel":
                    ops.write_kv(
                        case.query, self.qkv, case.pool, layer, self.positions, slots, self.cos_sin, pdl=self.pdl
                    )
                self.attend(table, layer)

    def attend(self, table: torch.Tensor, layer: int) -> torch.Tensor:
        case = self.case
        ops.paged_attention(
            self.out,
            case.query,
            case.pool,
            layer,
            table,
            self.start,
            case.lens,
            max_query_len=1,
            scale=case.heads[2] ** -0.5,
            workspace=self.workspace,
            planned=True,
            pdl=self.pdl,
        )
        return self.out

    def attend_fused(self, table: torch.Tensor, layer: int) -> None:
        ops.decode_attention(
            self.out,
            self.qkv,
            self.case.pool,
            layer,
            table,
            self.case.lens,
            self.cos_sin,
            scale=self.case.heads[2] ** -0.5,
            workspace=self.workspace,
            planned=True,
            pdl=self.pdl,
        )


def measure(model: str, cell: str, least_tokens: list[int], copy: float) -> dict[str, float | str]:
    case = Case.make(model, lengths(cell))
    variants: dict[str, Ours] = {"plain": Ours(case, pdl=False), "pdl": Ours(case, pdl=True)}
    variants["pdl+write"] = Ours(case, pdl=True, write="kernel")
    variants["pdl+fused"] = Ours(case, pdl=True, write="fused")
    for tokens in least_tokens:
        variants[f"least{tokens}"] = Ours(case, pdl=True, least_tokens=tokens)
    steps: dict[str, Callable[[], None]] = {name: ours.step for name, ours in variants.items()}
    peers = FlashInferDecode.peers(case) if flashinfer_version() else {}
    for name, peer in peers.items():
        variants["plain"].step()
        ours, theirs = variants["plain"].attend(case.tables[0], 0), peer.attend(0, 0)
        error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
        if not error < 1e-2:
            raise SystemExit(f"{model} {cell}: {name} differs from ours by {error}")
        steps[name] = peer.step
    for name, peer in (FlashAttentionDecode.peers(case) if flash_attention_present() else {}).items():
        theirs, expected = peer.attend(0, 0)[:1], peer.expected(0, 0)
        error = float((theirs.float() - expected).norm() / expected.norm())
        if not error < 1e-2:
            raise SystemExit(f"{model} {cell}: {name} differs from fp32 by {error}")
        steps[name] = peer.step
    times = microseconds([captured(step) for step in steps.values()])
    row: dict[str, float | str] = {"cell": f"{model}:{cell}", "floor": case.kv_bytes / copy * 1e6}
    row |= {name: time / case.calls for name, time in zip(steps, times, strict=True)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--least-tokens", default="", help="also with blocks reading at least so many tokens")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    copy = copy_rate()
    about = machine() | {"flashinfer": flashinfer_version() or "not installed"}
    about |= {"flash attention 3": "vllm 0.24.0's" if flash_attention_present() else "not given"}
    print(f"decode attention, us a layer; {about}; copy {copy / 1e12:.2f} TB/s")
    least_tokens = [int(tokens) for tokens in arguments.least_tokens.split(",") if tokens]
    rows = []
    for cell in arguments.cells.split(","):
        row = measure(*cell.split(":"), least_tokens, copy)
        rows.append(row)
        shown = " ".join(f"{name} {value:8.2f}" for name, value in row.items() if isinstance(value, float))
        print(f"{row['cell']:22s} {shown}  of copy {float(row['floor']) / float(row['pdl']):.3f}", flush=True)
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": about, "copy": copy, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
