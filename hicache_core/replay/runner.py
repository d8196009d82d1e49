"""The replay: every request of a trace through both tiers, with real bytes, each loaded one compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hicache_core.cache.hierarchy import Admission, HierarchicalCache
from hicache_core.cache.policies import policy_named
from hicache_core.controller import Controller, ControllerConfig
from hicache_core.device.base import DeviceRuntime
from hicache_core.device.cuda import CudaRuntime
from hicache_core.device.sim import SimRuntime
from hicache_core.errors import TraceError, TransferError, UnknownNameError
from hicache_core.memory.slots import PageAllocator
from hicache_core.plugins import PluginRegistry
from hicache_core.replay.content import Uint64Array, block_page_keys
from hicache_core.replay.report import Report
from hicache_core.replay.rows import PageLog, ReplayRows, poison_host
from hicache_core.replay.setup import ReplayConfig, assemble
from hicache_core.replay.trace import TraceRequest
from hicache_core.spec import DEVICES, Platform, platform_named

_RESERVED_PAGES = 1
_GUARD_PAGES = 1


def _sim(platform: Platform, seed: int) -> DeviceRuntime:
    return SimRuntime(platform, seed=seed)


def _cuda(platform: Platform, seed: int) -> DeviceRuntime:
    return CudaRuntime(platform)


_RUNTIMES: Mapping[str, Callable[[Platform, int], DeviceRuntime]] = {"sim": _sim, "cuda": _cuda}


def _runtime(config: ReplayConfig) -> DeviceRuntime:
    if config.device not in DEVICES:
        raise UnknownNameError(
            who="replay",
            got=f"device '{config.device}'",
            expected=f"one of {', '.join(DEVICES)}",
            remedy="Give one of these with --device.",
        )
    return _RUNTIMES[config.device](platform_named(config.platform), config.seed)


class Replay:
    """One replay of one trace.

    Args:
        config: what to do.
        registry: the plugins.
        trace_block_tokens: tokens of a block in the trace.

    Raises:
        HiCacheError: the configuration cannot work; nothing is left behind.
    """

    def __init__(self, config: ReplayConfig, registry: PluginRegistry, trace_block_tokens: int) -> None:
        self.config = config
        self.report = Report()
        policy = policy_named(config.policy)
        self.assembly = assemble(config, registry)
        self._block_tokens = config.block_tokens or trace_block_tokens
        self._trace_block_tokens = trace_block_tokens
        self._block_pages = self.assembly.block_pages(self._block_tokens)
        usable = config.device_blocks * self._block_pages
        device_pages = _RESERVED_PAGES + usable + _GUARD_PAGES
        host_pages = _GUARD_PAGES + config.host_blocks * self._block_pages + _GUARD_PAGES
        runtime = _runtime(config)
        self._rows = ReplayRows(self.assembly, runtime, device_pages)
        self._controller = Controller(
            ControllerConfig(
                io_backend=config.io_backend,
                layout=config.layout,
                host_pages=host_pages,
                layer_count=self.assembly.layer_count,
            ),
            self._rows.device_pools,
            runtime,
            registry,
        )
        poison_host(self._controller.group.pools)
        self._keep_guards(host_pages)
        space = self.assembly.specs[0].index_space
        self._cache = HierarchicalCache(
            self._controller,
            PageAllocator(
                space, _RESERVED_PAGES + usable, reserved=_RESERVED_PAGES, who="device slots of the replay"
            ),
            self._block_pages,
            policy,
        )
        self._device_log, self._host_log = PageLog(device_pages), PageLog(host_pages)

    def _keep_guards(self, host_pages: int) -> None:
        """Take the first and the last host page away, so that whoever writes beside a page is seen."""
        group = self._controller.group
        allocator = group.allocator(group.anchor_space)
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
            self._controller.engine.drain()
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
        keys = block_page_keys(self.config.seed, request.session, blocks, self._block_pages)
        try:
            with report.timed("load"):
                admission = self._cache.admit(names)
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

    def _check_loaded(self, admission: Admission, keys: Uint64Array) -> None:
        report, match = self.report, admission.match
        report.hits_device_blocks += match.device_blocks
        report.hits_host_blocks += match.host_blocks
        if admission.load.error is not None:
            report.failed_transfers += 1
            return
        if not match.host_blocks:
            return
        loaded = slice(match.device_blocks, match.device_blocks + match.host_blocks)
        pages, expected = admission.pages[loaded].ravel(), keys[loaded].ravel()
        self._device_log.write(pages, expected)
        report.bytes_host_to_device += admission.load.nbytes
        with report.timed("verify"):
            report.mismatches += self._rows.wrong_bytes(pages, expected)
        report.verified_bytes += len(pages) * self.assembly.page_bytes

    def _compute(self, admission: Admission, keys: Uint64Array) -> None:
        first = admission.match.device_blocks + admission.match.host_blocks
        pages, content = admission.pages[first:].ravel(), keys[first:].ravel()
        if pages.size:
            self._rows.compute(pages, content)
            self._device_log.write(pages, content)

    def _back_up(self, admission: Admission, keys: Uint64Array) -> None:
        try:
            self._cache.commit(admission)
        except TransferError:
            self.report.failed_transfers += 1
        self._cache.settle(admission)
        self.report.dropped_blocks += admission.dropped_blocks
        ticket = admission.backup
        if ticket is None:
            return
        if ticket.error is not None:
            self.report.failed_transfers += 1
            return
        self._host_log.write(admission.host_pages.ravel(), keys[admission.backed_up].ravel())
        self.report.bytes_device_to_host += ticket.nbytes

    def _sweep(self) -> None:
        pools = self._controller.group.pools
        if self.report.failed_transfers:
            self._device_log.keep_only(self._cache.index.device.resident_pages())
            self._host_log.keep_only(self._cache.index.host.resident_pages())
        self.report.mismatches += self._rows.sweep_device(self._device_log)
        self.report.mismatches += self._rows.sweep_host(pools, self._host_log)
        host_bytes = sum(pool.nbytes for pool in pools)
        self.report.swept_bytes = self._rows.nbytes + host_bytes

    def shrunk(self) -> list[str]:
        """Every way in which this replay is smaller than the model and the trace, as sentences."""
        said = []
        for spec in self.assembly.specs:
            full = self.assembly.full_layers[spec.pool]
            if spec.layer_count < full:
                said.append(f"pool {spec.pool}: {spec.layer_count} of {full} layers")
        if self._block_tokens != self._trace_block_tokens:
            said.append(f"a block of {self._trace_block_tokens} tokens stands for {self._block_tokens}")
        tokens = self._block_pages * self.assembly.page_slots
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
        self._controller.close()
