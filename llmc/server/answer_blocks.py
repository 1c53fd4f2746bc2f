"""The blocks of a generation's only answer, whole or as events of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from llmc.server.protocol.blocks import BlockEvent, Blocks
from llmc.server.protocol.chunks import typed_event

if TYPE_CHECKING:
    from llmc.runtime.text.answer_parser import AnswerParser
    from llmc.server.generation import Generation


async def whole_blocks(generation: Generation, parser: AnswerParser) -> Blocks:
    """Return the blocks of the whole answer."""
    (one,) = await generation.answers()
    blocks = Blocks(parser)
    for _ in blocks.feed(one.text, one.finish_reason, one.stop_reason):
        pass
    return blocks


async def block_events(
    generation: Generation, blocks: Blocks, events: Callable[[BlockEvent], Iterator[dict[str, Any]]]
) -> AsyncGenerator[bytes, None]:
    """Yield the `events` of what happens to the blocks; those that are ready together are joined."""
    async with aclosing(generation.updates()) as news:
        async for updates in news:
            found: list[bytes] = []
            for _, update in updates:
                for event in blocks.feed(update.text, update.finish_reason, update.stop_reason):
                    found += map(typed_event, events(event))
            yield b"".join(found)
