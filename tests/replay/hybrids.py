"""Models with index spaces beside the anchor's, shrunk for tests, with the bytes that arithmetic says."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from tests.hybrid_twin import ANCHOR, TwinSpace


@frozen(kw_only=True)
class Hybrid:
    """A model and how it is replayed.

    Args:
        choices: of the replay, but for the sizes of the tiers.
        block_bytes: bytes that a block keeps in each index space.
        space: name of the space beside the anchor's; None where pools share the anchor's.
        bound: the choice that bounds it.
        block_pages: pages that a block keeps of it.
        last_blocks: a prefix needs the pages of so many of its last blocks.
    """

    choices: dict[str, Any]
    block_bytes: dict[str, int]
    space: str | None = None
    bound: str = ""
    block_pages: int = 1
    last_blocks: int = 1

    def twin_spaces(self, device_blocks: int, host_blocks: int, bound: int) -> dict[str, TwinSpace]:
        """The space for the twin: so many pages on the device, as many more on the host as it has blocks."""
        if self.space is None:
            return {}
        blocks = bound // self.block_pages
        host = -(-blocks * host_blocks // device_blocks)
        return {self.space: TwinSpace(blocks, host, self.last_blocks)}

    def bounded(self, bound: int) -> dict[str, Any]:
        """The choices with a bound of the space."""
        return self.choices if self.space is None else {**self.choices, self.bound: bound}


def _states(model: str, token_bytes: int, slot_bytes: int, layers: int) -> Hybrid:
    return Hybrid(
        choices={"model": model, "page_slots": 4, "block_tokens": 8, "layers": layers},
        block_bytes={ANCHOR: layers * 8 * token_bytes, "state": layers * slot_bytes},
        space="state",
        bound="state_slots",
    )


HYBRIDS = {
    # Two pages of 256 a block, of which the window of 128 keeps the last.
    "deepseek-v4-flash": Hybrid(
        choices={
            "model": "deepseek-v4-flash",
            "variant": "cuda_v4",
            "page_slots": None,
            "block_tokens": 512,
            "layers": 2,
        },
        block_bytes={
            ANCHOR: 2 * 2 * (37_440 + 8_448 + 1_728),
            "swa": 2 * (149_760 + 8 * 8_192 + 8 * 2_048),
        },
        space="swa",
        bound="swa_pages",
    ),
    # Rows of tokens, and a window of 128 that is two blocks of 64.
    "gpt-oss-120b": Hybrid(
        choices={"model": "gpt-oss-120b", "page_slots": 16, "block_tokens": 64, "layers": 2},
        block_bytes=dict.fromkeys((ANCHOR, "swa"), 2 * 64 * 2 * (8 * 64 * 2)),
        space="swa",
        bound="swa_pages",
        block_pages=4,
        last_blocks=2,
    ),
    # Keys and values of 8 heads; a scan over 8,192 channels with 16 states each, a convolution over four.
    "jamba-v0.1": _states("jamba-v0.1", 2 * 8 * 128 * 2, 8_192 * 16 * 4 + 8_192 * 3 * 2, layers=2),
    # Keys and values of 2 heads; 64 matrices of 128 by 128, a convolution over 2 x 16 + 64 heads.
    "qwen3.5-397b-a17b": _states(
        "qwen3.5-397b-a17b", 2 * 2 * 256 * 2, 64 * 128 * 128 * 4 + (2 * 16 + 64) * 128 * 3 * 2, layers=1
    ),
    # The indexer's rows are pages of the anchor's own space.
    "deepseek-v3.2": Hybrid(
        choices={"model": "deepseek-v3.2", "page_slots": 64, "block_tokens": 128, "layers": 2},
        block_bytes={ANCHOR: 2 * 2 * (64 * (512 + 64) * 2 + 64 * (128 + 4))},
    ),
}
WITH_SPACE = [name for name, hybrid in HYBRIDS.items() if hybrid.space is not None]
