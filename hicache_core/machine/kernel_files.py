"""Files of /proc and /sys: absent, numbers, tables and lists, or an error that names the file."""

from __future__ import annotations

import re
from pathlib import Path

from hicache_core.errors import MachineError

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,20}", re.ASCII)
"""The kernel counts in 64 bits."""


class KernelFiles:
    """The files below ``root``, which stands for ``/``.

    A file that is absent says that the kernel has no such thing, and reads as None. One that is there but
    cannot be read or understood is an error: a limit that is not known must not count as none.

    Args:
        root: folder in which ``/proc`` and ``/sys`` lie.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def at(self, path: str) -> Path:
        """Where the file that the machine calls ``path`` lies."""
        return self._root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Contents of a file; None where it is absent; MachineError where it cannot be read."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="surrogateescape")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise MachineError(
                path=path,
                got=str(error.strerror or error),
                expected="a file that can be read",
                remedy="Let this process read it: what it allows is not known otherwise.",
            ) from error

    def required(self, path: str) -> str:
        """Contents of a file without which nothing can be said; MachineError where it is absent."""
        text = self.text(path)
        if text is None:
            raise MachineError(
                path=path,
                got="no such file",
                expected="the file of a Linux kernel",
                remedy="Mount /proc and /sys here.",
            )
        return text

    def number(self, path: str, *, unlimited: str = "", minimum: int = 0) -> int | None:
        """The whole number that is a file's contents; None where absent, or where it says ``unlimited``."""
        text = self.text(path)
        if text is None or (unlimited and text.strip() == unlimited):
            return None
        return self.whole(path, text.strip(), minimum=minimum)

    def entries(self, path: str, *names: str) -> dict[str, int]:
        """Those of ``names`` that a file of one entry a line has (``memory.stat``, ``meminfo``), kB as bytes.

        A line is a name and a whole number; words before the name, as in ``Node 0 MemTotal: 8 kB``, do not
        count, and lines of other names may be of any shape. Nothing where the file is absent.
        """
        found: dict[str, int] = {}
        for line in (self.text(path) or "").splitlines():
            words = line.split()
            scale = 1024 if words[-1:] == ["kB"] else 1
            words = words[:-1] if scale > 1 else words
            entry = words[-2].rstrip(":") if len(words) > 1 else ""
            if entry in names:
                found[entry] = self.whole(path, words[-1]) * scale
        return found

    def numbers(self, path: str) -> tuple[int, ...] | None:
        """Numbers of a list such as ``0-3,8``, ascending; None where absent."""
        text = self.text(path)
        if text is None:
            return None
        found: set[int] = set()
        for part in filter(None, text.strip().split(",")):
            matched = _RANGE.fullmatch(part)
            if matched is None:
                raise self.garbage(path, part, "numbers and ranges, such as 0-3,8")
            first, last = matched.groups(default=matched[1])
            found.update(range(int(first), int(last) + 1))
        return tuple(sorted(found))

    def whole(self, path: str, word: str, *, minimum: int = 0) -> int:
        """``word`` of the file ``path`` as a number of at least ``minimum``; MachineError if it is none."""
        if not _NUMBER.fullmatch(word) or int(word) < minimum:
            raise self.garbage(path, word, f"a whole number of at least {minimum}")
        return int(word)

    def garbage(self, path: str, got: str, expected: str) -> MachineError:
        """The error about contents that make no sense."""
        return MachineError(
            path=path, got=repr(got[:80]), expected=expected, remedy="Report the file: the kernel writes it."
        )
