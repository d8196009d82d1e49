"""The replay: every request of a trace through both tiers, with real bytes, each loaded one compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hicache_core.cache.hierarchy import Admission, HierarchicalCache
from hicache_core.cache.policies import policy_named
from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.base import DeviceRuntime
from hicache_core.device.cuda import CudaRuntime
from hicache_core.device.hip import HipRuntime
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import TraceError, TransferError, UnknownNameError
from hicache_core.memory.options import MemoryOptions, Progress
from hicache_core.memory.slots import Int64Array, PageAllocator
from hicache_core.plugins import PluginRegistry
from hicache_core.replay.content import Uint64Array, block_page_keys
from hicache_core.replay.report import Report
from hicache_core.replay.rows import PageLog, ReplayRows, poison_host
from hicache_core.replay.setup import ReplayConfig, SpaceSize, assemble
from hicache_core.replay.trace import TraceRequest
from hicache_core.spec import DEVICES, Platform, PoolSpec, platform_named

SpaceKeys = Mapping[str, Uint64Array]
"""The content of a request: of each index space, uint64[blocks, block_pages]."""
_RESERVED_PAGES = 1
_GUARD_PAGES = 1


def _sim(platform: Platform, seed: int) -> DeviceRuntime:
    return SimRuntime(platform, seed=seed)


def _cuda(platform: Platform, seed: int) -> DeviceRuntime:
    return CudaRuntime(platform)


def _hip(platform: Platform, seed: int) -> DeviceRuntime:
    return HipRuntime(platform)


_RUNTIMES: Mapping[str, Callable[[Platform, int], DeviceRuntime]] = {
    "sim": _sim,
    "cuda": _cuda,
    "hip": _hip,
}


def _runtime(config: ReplayConfig, platform: Platform) -> DeviceRuntime:
    if config.device not in DEVICES:
        raise UnknownNameError(
            who="replay",
            got=f"device '{config.device}'",
            expected=f"one of {', '.join(DEVICES)}",
            remedy="Give one of these with --device.",
        )
    return _RUNTIMES[config.device](platform, config.seed)


class Books:
    """One index space of a replay: its device rows, and what was written last to each page of either tier.

    Args:
        model: id of the model.
        specs: the pools of the space.
        size: how many pages it has.
        runtime: where the device rows are allocated.
    """

    def __init__(
        self, model: str, specs: Sequence[PoolSpec], size: SpaceSize, runtime: DeviceRuntime
    ) -> None:
        self.size = size
        self.host_pages = _GUARD_PAGES + size.host_pages + _GUARD_PAGES
        device_pages = _RESERVED_PAGES + size.device_pages + _GUARD_PAGES
        self.rows = ReplayRows(model, specs, runtime, device_pages)
        self.allocator = PageAllocator(
            size.space,
            _RESERVED_PAGES + size.device_pages,
            reserved=_RESERVED_PAGES,
            who=f"device slots of '{size.space.name}'",
        )
        self.device_log, self.host_log = PageLog(device_pages), PageLog(self.host_pages)

    def compute(self, pages: Int64Array, keys: Uint64Array) -> None:
        """Write the content of some pages: [n, block_pages] each, as a model's forward pass would."""
        if pages.size:
            self.rows.compute(pages.ravel(), keys.ravel())
            self.device_log.write(pages.ravel(), keys.ravel())

    def loaded(self, pages: Int64Array, keys: Uint64Array) -> tuple[int, int]:
        """Compare pages that were loaded: wrong bytes, and bytes compared."""
        if not pages.size:
            return 0, 0
        self.device_log.write(pages.ravel(), keys.ravel())
        return self.rows.wrong_bytes(pages.ravel(), keys.ravel()), pages.size * self.rows.page_bytes


class Replay:
    """One replay of one trace.

    Args:
        config: what to do.
        registry: the plugins.
        trace_block_tokens: tokens of a block in the trace.
        progress: told how much of a buffer's host memory is there, in bytes; what it raises ends it.

    Raises:
        HiCacheError: the configuration cannot work; nothing is left behind.
    """

    def __init__(
        self,
        config: ReplayConfig,
        registry: PluginRegistry,
        trace_block_tokens: int,
        *,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self.report = Report()
        policy = policy_named(config.policy)
        self.assembly = assemble(config, registry)
        self._block_tokens = config.block_tokens or trace_block_tokens
        self._trace_block_tokens = trace_block_tokens
        self._block_pages = self.assembly.block_pages(self._block_tokens)
        runtime = _runtime(config, platform_named(config.platform, registry.platforms))
        self._books = {
            name: Books(self.assembly.model, self.assembly.specs_in(name), size, runtime)
            for name, size in self.assembly.sizes(config, self._block_tokens).items()
        }
        self._anchor = self.assembly.anchor_space.name
        pools = {
            pool.spec.pool: pool for books in self._books.values() for pool in books.rows.device_pools
        }
        self.controller = Controller(
            ControllerConfig(
                io_backend=config.io_backend,
                layout=config.layout,
                host_pages=self._books[self._anchor].host_pages,
                other_host_pages={
                    name: books.host_pages for name, books in self._books.items() if name != self._anchor
                },
                layer_count=self.assembly.layer_count,
                allow_kernel_layer_first=config.allow_kernel_layer_first,
                probe=config.probe,
                memory=MemoryOptions(progress=progress),
            ),
            [pools[spec.pool] for spec in self.assembly.specs],
            runtime,
            registry,
        )
        poison_host(self.controller.group.pools)
        for name, books in self._books.items():
            self._keep_guards(name, books.host_pages)
        self._cache = HierarchicalCache(
            self.controller,
            {name: books.allocator for name, books in self._books.items()},
            self._block_pages,
            policy,
        )

    def _keep_guards(self, space: str, host_pages: int) -> None:
        """Take the first and the last host page away, so that whoever writes beside a page is seen."""
        allocator = self.controller.group.allocator(space)
        pages = allocator.allocate_pages(host_pages)
        assert pages is not None, "a fresh allocator has all its pages"
        allocator.give_back(pages[_GUARD_PAGES:-_GUARD_PAGES])

    def run(self, requests: Iterable[TraceRequest], advance: Callable[[], Any] = lambda: None) -> Report:
        """Replay requests, then look at every byte of both tiers.

        Args:
            requests: the requests, in order.
            advance: called after each request.
        """
        with self.report.timed("total"):
            for request in itertools.islice(requests, self.config.limit):
                self._one(request)
                advance()
            self.controller.engine.drain()
            with self.report.timed("sweep"):
                self._sweep()
        return self.report

    def _one(self, request: TraceRequest) -> None:
        report, blocks = self.report, request.block_ids
        if self.config.block_tokens is None and request.block_tokens != self._trace_block_tokens:
            raise TraceError(
                path="trace",
                line=request.line,
                got=f"blocks of {request.block_tokens} tokens after blocks of {self._trace_block_tokens}",
                expected="one size of block in a trace",
                remedy="Say with --tokens-per-block what a block stands for.",
            )
        report.requests += 1
        if len(blocks) > self.config.device_blocks:
            report.requests_too_large += 1
            return
        report.blocks_referenced += len(blocks)
        if not len(blocks):
            return
        names = [(request.session, block) for block in blocks.tolist()]
        keys = {name: self._keys(name, request) for name in self._books}
        try:
            with report.timed("load"):
                complete = min(request.input_tokens // request.block_tokens, len(names))
                admission = self._cache.admit(names, complete)
                self._cache.land(admission)
        except TransferError:
            # The load was refused: the request goes unserved.
            report.failed_transfers += 1
            return
        self._check_loaded(admission, keys)
        with report.timed("compute"):
            self._compute(admission, keys)
        with report.timed("backup"):
            self._back_up(admission, keys)

    def _keys(self, space: str, request: TraceRequest) -> Uint64Array:
        """The key of each page that each block of a request may have in an index space."""
        pages = self._books[space].size.retention.block_pages
        salt = "" if space == self._anchor else space
        return block_page_keys(self.config.seed, request.session, request.block_ids, pages, salt)

    def _check_loaded(self, admission: Admission, keys: SpaceKeys) -> None:
        report, match = self.report, admission.match
        report.hits_device_blocks += match.device_blocks
        report.hits_host_blocks += match.host_blocks
        report.hits_cut_blocks += admission.cut_blocks
        if admission.load.error is not None:
            report.failed_transfers += 1
            return
        report.bytes_host_to_device += admission.load.nbytes
        loaded = slice(match.device_blocks, match.device_blocks + match.host_blocks)
        placed = {self._anchor: (admission.pages[loaded], keys[self._anchor][loaded])}
        for name, mine in admission.others.items():
            placed[name] = mine.loaded.pages, keys[name][mine.loaded.at]
        with report.timed("verify"):
            for name, (pages, expected) in placed.items():
                wrong, compared = self._books[name].loaded(pages, expected)
                report.mismatches += wrong
                report.verified_bytes += compared

    def _compute(self, admission: Admission, keys: SpaceKeys) -> None:
        match = admission.match
        # What is resident stands, also where another index space lacks what would make it usable.
        first = max(match.device_blocks + match.host_blocks, admission.resident_blocks)
        self._books[self._anchor].compute(admission.pages[first:], keys[self._anchor][first:])
        for name, mine in admission.others.items():
            self._books[name].compute(mine.computed.pages, keys[name][mine.computed.at])

    def _back_up(self, admission: Admission, keys: SpaceKeys) -> None:
        try:
            self._cache.commit(admission)
        except TransferError:
            self.report.failed_transfers += 1
        self._cache.settle(admission)
        self.report.dropped.update(admission.dropped)
        ticket = admission.backup
        if ticket is None:
            return
        if ticket.error is not None:
            self.report.failed_transfers += 1
            return
        placed = {name: mine.backed_up for name, mine in admission.others.items()}
        placed[self._anchor] = admission.backed_up
        for name, mine in placed.items():
            self._books[name].host_log.write(mine.pages.ravel(), keys[name][mine.at].ravel())
        self.report.bytes_device_to_host += ticket.nbytes

    def _sweep(self) -> None:
        group, report = self.controller.group, self.report
        for name, books in self._books.items():
            if report.failed_transfers:
                device, host = self._cache.stores(name)
                books.device_log.keep_only(device.tier.resident_pages())
                books.host_log.keep_only(host.tier.resident_pages())
            report.mismatches += books.rows.sweep_device(books.device_log)
            report.mismatches += books.rows.sweep_host(group.pools_of(name), books.host_log)
            report.swept_bytes += books.rows.nbytes
        report.swept_bytes += sum(pool.nbytes for pool in group.pools)

    def shrunk(self) -> list[str]:
        """Every way in which this replay is smaller than the model and the trace, as sentences."""
        said = []
        for spec in self.assembly.specs:
            full = self.assembly.full_layers[spec.pool]
            if spec.layer_count < full:
                said.append(f"pool {spec.pool}: {spec.layer_count} of {full} layers")
        if self._block_tokens != self._trace_block_tokens:
            said.append(f"a block of {self._trace_block_tokens} tokens stands for {self._block_tokens}")
        tokens = self._block_pages * self.assembly.anchor_space.page_slots
        if tokens != self._block_tokens:
            said.append(f"a block of {self._block_tokens} tokens fills {tokens} slots")
        if self.config.limit is not None:
            said.append(f"at most {self.config.limit} requests")
        said.extend(f"without pool {left.pool}: {left.reason}" for left in self.assembly.left_out)
        return said

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return self.report.as_dict(self.config, self.assembly, self.shrunk())

    def close(self) -> None:
        """Release the host memory."""
        self.controller.close()
