"""How a sequence gives up its blocks: copied to host memory, or dropped and computed again."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import PreemptionMode


@dataclass(slots=True)
class PreemptionCost:
    """Swap if copying out and back takes less time than prefilling what no other sequence keeps resident.

    block_bytes: of one block, all layers. transfer_rate: bytes a second between device and host, measured at start.
    prefill_rate: tokens a second, updated from the steps as they run; 0 until one was measured, and then swapping wins.
    """

    mode: PreemptionMode = PreemptionMode.AUTO
    block_bytes: int = 0
    transfer_rate: float = 0.0
    prefill_rate: float = 0.0

    def prefers_swap(self, num_blocks: int, uncached_tokens: int) -> bool:
        if self.mode is not PreemptionMode.AUTO:
            return self.mode is PreemptionMode.SWAP
        if self.prefill_rate <= 0.0:
            return True
        if self.transfer_rate <= 0.0:
            return False
        copying = 2 * num_blocks * self.block_bytes / self.transfer_rate
        return copying < uncached_tokens / self.prefill_rate
