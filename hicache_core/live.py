"""A controller as plain data, and the socket on which a running one gives it to `hicache describe --live`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hicache_core.errors import LiveError

if TYPE_CHECKING:
    from hicache_core.controller import Controller
    from hicache_core.pool import HostPool

SCHEMA = "hicache.live/1"
_TIMEOUT_S = 10.0


def _pool(controller: Controller, pool: HostPool) -> dict[str, Any]:
    plan = controller.plan.pools.get(pool.spec.pool)
    moves = None
    if plan is not None:
        moves = {
            "backup": plan.backup.value,
            "load": plan.load.value,
            "staged": plan.staged,
            "backup_host_indices": plan.backup_host_indices.value,
            "load_host_indices": plan.load_host_indices.value,
            "pointer_domain": plan.pointer_domain.value,
            "staging_bytes": plan.staging_bytes,
        }
    return {
        "pool": pool.spec.pool,
        "family": pool.spec.family,
        "index_space": pool.spec.index_space.name,
        "anchor": pool.spec.anchor,
        "layers": pool.spec.layer_count,
        "host_pages": pool.pages,
        "host_bytes": pool.nbytes,
        "registrations": sum(len(buffer.memory.segments) for buffer in pool.buffers),
        "index_conversions": pool.load_indices.conversions,
        "moves": moves,
        "capabilities": {name: can.as_data() for name, can in controller.capabilities(pool)},
    }


def describe(controller: Controller) -> dict[str, Any]:
    """What a controller is and has decided, as plain data that JSON can hold.

    Args:
        controller: an open controller; it serves on meanwhile.
    """
    return {
        "schema": SCHEMA,
        "process": os.getpid(),
        "platform": controller.plan.platform,
        "io_backend": controller.plan.io_backend,
        "layout": controller.plan.layout,
        "device": controller.device,
        "probe": controller.config.probe,
        "conditions": [f"[{one.rule}] {one.text}" for one in controller.plan.conditions],
        "spaces": {
            name: {"page_slots": a.space.page_slots, "pages": a.pages, "free_pages": a.free_pages}
            for name, a in controller.group.allocators.items()
        },
        "pools": [_pool(controller, pool) for pool in controller.group.pools],
        "index_synchronisations": controller.index_synchronisations,
        "ledger": [
            {"who": entry.who, "kind": entry.kind.value, "nbytes": entry.nbytes}
            for entry in controller.ledger.snapshot()
        ],
        "decisions": controller.decisions.as_data(),
    }


class LiveSocket:
    """Serves a description on a Unix socket, made anew for each reader, until it is closed.

    Args:
        path: where the socket is made; its folder decides who may read.
        description: makes the data that a reader gets.

    Raises:
        LiveError: the socket cannot be made there.
    """

    def __init__(self, path: str | Path, description: Callable[[], dict[str, Any]]) -> None:
        class Reader(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                # A reader that went away is its own affair.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.wfile.write(json.dumps(description()).encode())

        self.path = Path(path)
        self._closing = threading.Lock()
        self._closed = False
        try:
            self._server = socketserver.ThreadingUnixStreamServer(str(path), Reader)
        except OSError as error:
            raise LiveError(
                who="live socket",
                got=f"{path}: {error.strerror or error}",
                expected="a free path, short enough for a socket, in a folder that can be written",
                remedy="Give another path, or remove what an earlier process left there.",
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="hicache-live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and remove the socket; a second call does nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> LiveSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_live(path: Path) -> dict[str, Any]:
    """What a running controller says on its socket.

    Raises:
        LiveError: nobody serves there, or what answers is no controller.
    """
    try:
        with socket.socket(socket.AF_UNIX) as reader:
            reader.settimeout(_TIMEOUT_S)
            reader.connect(str(path))
            with reader.makefile("rb") as answer:
                found: Any = json.loads(answer.read())
    except (OSError, ValueError) as error:
        raise LiveError(
            who="describe --live",
            got=f"{path}: {error}",
            expected="the socket of a controller that is running",
            remedy="Give the path on which the engine serves its description.",
        ) from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise LiveError(
            who="describe --live",
            got=f"{path}: an answer that is not of schema {SCHEMA}",
            expected="the socket of a controller of this release",
            remedy="Use the command of the release that the engine runs.",
        )
    return found
