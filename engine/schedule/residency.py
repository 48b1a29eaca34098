"""Which sequences hold a slot and blocks, and where their blocks come from: host memory, a sibling, the prefix cache,
or new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import EngineError
from engine.kv.block_table import BlockTables
from engine.kv.checked import CheckedBlockAllocator
from engine.kv.prefix_index import Chain, PrefixIndex
from engine.kv.swap import SwapSpace
from engine.schedule.plan import BlockMoves
from engine.schedule.preemption import PreemptionCost
from engine.schedule.sequence import NO_SLOT, Phase, Sequence
from engine.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class _Shared:
    """Leading blocks that others computed. The first `computed` tokens need not run; where that ends inside the last
    block, the block will be written and must be copied first."""

    blocks: list[int]
    computed: int
    chain: Chain | None

    def copies_last(self, block_size: int) -> bool:
        return self.computed < len(self.blocks) * block_size


class Residency:
    """Between `begin_plan` and `end_plan` it collects the block moves that the step must make first."""

    def __init__(
        self,
        tables: BlockTables,
        prefix_index: PrefixIndex | None = None,
        swap: SwapSpace | None = None,
        cost: PreemptionCost | None = None,
        *,
        shares: bool = True,
    ) -> None:
        """shares False: every sequence computes all of its tokens itself. Needs a prefix index of None."""
        if prefix_index is not None and not shares:
            raise ValueError("a prefix index shares blocks")
        self.shares = shares
        self.tables = tables
        self.swap = swap
        self.cost = cost or PreemptionCost()
        self.prefix_index = prefix_index
        self._checked = tables.allocator if isinstance(tables.allocator, CheckedBlockAllocator) else None
        self._moves = BlockMoves()
        self._sources: list[int] = []

    @property
    def available_blocks(self) -> int:
        """Free, or held by the prefix cache only."""
        allocator = self.tables.allocator
        return allocator.num_free + allocator.num_cached

    def begin_plan(self) -> None:
        self._moves, self._sources = BlockMoves(), []

    def end_plan(self) -> BlockMoves:
        """The moves, whose sources were kept from being handed out again while the plan was made."""
        self.tables.allocator.release(self._sources)
        return self._moves

    def take_freed(self, moves: BlockMoves) -> None:
        """Adds what nobody owns any more, if the allocator keeps account of it."""
        if self._checked is not None:
            moves.freed = self._checked.take_freed()

    # -- getting in ----------------------------------------------------------------------------------------------------

    def claim(self, sequence: Sequence, *, alone: bool, watermark: int) -> bool:
        """A slot, and blocks for every token so far and the next; False, with nothing changed, if they are not there.
        Alone a sequence needs no room beyond its own tokens. Sets `num_computed` to what it need not run."""
        if not self.tables.num_free_slots:
            return False
        if sequence.swapped_blocks:
            return self._bring_back(sequence, alone, watermark)
        room = self._room(sequence, alone)
        shared = self._shared(sequence)
        options = (
            [shared, self._without_copy(sequence, shared)] if shared.copies_last(self.tables.block_size) else [shared]
        )
        for option in options:
            revived = sum(self.tables.allocator.ref_count(block) == 0 for block in option.blocks)
            wanted = room - len(option.blocks) + option.copies_last(self.tables.block_size)
            if self.available_blocks - revived >= wanted + (0 if alone else watermark):
                self._enter(sequence, option)
                return True
        return False

    def _room(self, sequence: Sequence, alone: bool) -> int:
        return self.tables.blocks_for(sequence.num_tokens + (not alone))

    def _bring_back(self, sequence: Sequence, alone: bool, watermark: int) -> bool:
        if self.available_blocks < self._room(sequence, alone) + (0 if alone else watermark):
            return False
        slot = self._take_slot(sequence)
        host, sequence.swapped_blocks = sequence.swapped_blocks, []
        device = self.tables.rows[slot, : len(host)].tolist()
        self._moves.back += zip(host, device, strict=True)
        self._swap_space.give_back(host)
        return True

    def _enter(self, sequence: Sequence, shared: _Shared) -> None:
        allocator, tables = self.tables.allocator, self.tables
        row = list(shared.blocks)
        allocator.retain(row)
        if shared.copies_last(tables.block_size):
            source, [target] = row[-1], allocator.allocate(1)
            if self._followed is not None:
                self._followed.handed_out([target])
            self._moves.copies.append((source, target))
            self._sources.append(source)
            row[-1] = target
        sequence.num_computed = shared.computed
        sequence.shared_tokens = len(shared.blocks) * tables.block_size
        sequence.chain = shared.chain
        self._take_slot(sequence, row)

    def _take_slot(self, sequence: Sequence, row: list[int] | None = None) -> int:
        """A slot whose row starts with `row` and has blocks for every token so far."""
        tables = self.tables
        slot = sequence.slot = tables.acquire_slot()
        if row:
            tables.rows[slot, : len(row)] = row
            tables.lengths[slot] = len(row)
        if tables.grow([slot], [sequence.num_tokens]) != 1:
            raise EngineError("admission counted blocks that are not there")
        self._note_handed_out(slot, len(row or ()), int(tables.lengths[slot]))
        sequence.capacity = int(tables.lengths[slot]) * tables.block_size
        return slot

    def _shared(self, sequence: Sequence) -> _Shared:
        """A running sibling's prompt, or the prefix cache. The last token is always run: its logits are needed. So is
        a whole prompt whose log probabilities are wanted."""
        size = self.tables.block_size
        if not self.shares:
            return _Shared([], 0, None)
        if sequence.candidate == 0 and sequence.group.scores_prompt:
            return _Shared([], 0, self._cached(sequence, 0)[1])
        sibling = self._sibling(sequence)
        if sibling is None:
            blocks, chain = self._cached(sequence, sequence.num_tokens)
            computed = min(len(blocks) * size, sequence.num_tokens - 1)
        else:
            computed = sequence.num_prompt - 1
            blocks = self.tables.rows[sibling.slot].tolist()
            chain = self._cached(sequence, sequence.num_prompt)[1]
        return _Shared(blocks[: -(-computed // size)], computed, chain)

    def _without_copy(self, sequence: Sequence, shared: _Shared) -> _Shared:
        """Gives up the last block rather than copying it."""
        blocks = shared.blocks[:-1]
        computed = len(blocks) * self.tables.block_size
        return _Shared(blocks, computed, self._cached(sequence, computed)[1])

    def _cached(self, sequence: Sequence, num_tokens: int) -> tuple[list[int], Chain | None]:
        """What the prefix cache holds of the first `num_tokens` tokens."""
        request = sequence.group.request
        if self.prefix_index is None or request.cache_bypass:
            return [], None
        return self.prefix_index.match(sequence.token_ids, request.cache_salt, num_tokens)

    def reads_cache(self, request: GenerationRequest) -> bool:
        """Whether a request's prompt may be found computed."""
        enabled = self.prefix_index is not None
        return enabled and not request.cache_bypass and request.prompt_top_logprobs is None

    def cached_tokens(self, request: GenerationRequest) -> int:
        """How many of a prompt's tokens need not be computed, as things are."""
        if self.prefix_index is None or not self.reads_cache(request):
            return 0
        return len(self.prefix_index.match(request.prompt_token_ids, request.cache_salt)[0]) * self.tables.block_size

    def block_keys(self, request: GenerationRequest) -> Iterator[int]:
        """Of the whole blocks of a prompt that reads the cache: two prompts share as many as they begin with alike."""
        if self.prefix_index is None:
            raise EngineError("keys of blocks without a prefix index")
        return self.prefix_index.keys(request.prompt_token_ids, request.cache_salt)

    def _sibling(self, sequence: Sequence) -> Sequence | None:
        """A candidate of the same request that has the whole prompt in its blocks."""
        if sequence.num_generated or sequence.num_pending:
            return None
        for other in sequence.group.sequences:
            if other is not sequence and other.phase is Phase.RUNNING and other.num_computed >= sequence.num_prompt:
                return other
        return None

    # -- staying and leaving -------------------------------------------------------------------------------------------

    def grow(self, needy: list[tuple[Sequence, int]]) -> bool:
        """Blocks for so many tokens of each sequence; False if they ran out on the way."""
        size = self.tables.block_size
        served = self.tables.grow([sequence.slot for sequence, _ in needy], [count for _, count in needy])
        for sequence, count in needy[:served]:
            before, sequence.capacity = sequence.capacity, -(-count // size) * size
            self._note_handed_out(sequence.slot, before // size, sequence.capacity // size)
        return served == len(needy)

    @property
    def _followed(self) -> PrefixIndex | None:
        """The prefix index, if somebody wants to know what becomes of its blocks."""
        return self.prefix_index if self.prefix_index is not None and self.prefix_index.followed else None

    def _note_handed_out(self, slot: int, begin: int, end: int) -> None:
        if self._followed is not None:
            self._followed.handed_out(self.tables.rows[slot, begin:end].tolist())

    def publish(self, sequence: Sequence, num_committed: int) -> None:
        """Makes the blocks behind the first `num_committed` tokens, whose K and V are known to be good, findable."""
        if self.prefix_index is None or sequence.chain is None or sequence.slot == NO_SLOT:
            return
        full = num_committed // self.tables.block_size
        if full > sequence.chain.blocks:
            blocks = self.tables.rows[sequence.slot, :full].tolist()
            self.prefix_index.publish(sequence.chain, sequence.token_ids, blocks)

    def hash_ahead(self, sequence: Sequence, num_tokens: int) -> None:
        """What `publish` of the first `num_tokens` tokens would have to compute first, so that it need not."""
        if self.prefix_index is not None and sequence.chain is not None:
            self.prefix_index.hash_ahead(sequence.chain, sequence.token_ids, num_tokens // self.tables.block_size)

    def release(self, sequence: Sequence) -> None:
        """Gives back whatever the sequence holds, in host memory too."""
        if sequence.slot != NO_SLOT:
            self.tables.release_slot(sequence.slot)
            sequence.slot = NO_SLOT
        if sequence.swapped_blocks:
            self._swap_space.give_back(sequence.swapped_blocks)
            sequence.swapped_blocks = []

    def preempt(self, sequence: Sequence) -> bool:
        """Gives back slot and blocks. True if their contents go to host memory, False if they must be computed
        again."""
        count = self.tables.blocks_for(sequence.num_computed)
        blocks = self.tables.rows[sequence.slot, :count].tolist()
        host = self._host_blocks(sequence, blocks)
        self.tables.release_slot(sequence.slot)
        sequence.slot, sequence.shared_tokens = NO_SLOT, 0
        if host is None:
            sequence.num_computed = 0
            return False
        self._moves.out += zip(blocks, host, strict=True)
        sequence.swapped_blocks = host
        return True

    def _host_blocks(self, sequence: Sequence, blocks: list[int]) -> list[int] | None:
        if self.swap is None or not blocks:
            return None
        kept = 0
        while kept < len(blocks) and self.tables.allocator.ref_count(blocks[kept]) > 1:
            kept += 1
        uncached = max(0, sequence.num_computed - kept * self.tables.block_size)
        return self.swap.take(len(blocks)) if self.cost.prefers_swap(len(blocks), uncached) else None

    @property
    def _swap_space(self) -> SwapSpace:
        if self.swap is None:
            raise EngineError("swapped blocks without a swap space")
        return self.swap

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held, by the counts alone."""
        allocator = self.tables.allocator
        whole = allocator.num_free + allocator.num_cached == allocator.num_blocks
        slots = self.tables.num_free_slots == len(self.tables.lengths)
        return whole and slots and not allocator.num_live and not (self.swap and self.swap.num_used)

    def check_idle(self) -> None:
        """Raises EngineError unless nothing is held: live = 0, free + cached = total, swap empty."""
        allocator = self.tables.allocator
        allocator.check()
        if allocator.num_live or allocator.num_free + allocator.num_cached != allocator.num_blocks:
            raise EngineError(f"{allocator.num_live} blocks are held by no request")
        if self.tables.num_free_slots != len(self.tables.lengths) or self.tables.lengths.any():
            raise EngineError("a slot is held by no request")
        if self.swap is not None:
            self.swap.check()
            if self.swap.num_used:
                raise EngineError(f"{self.swap.num_used} swapped blocks are held by no request")
