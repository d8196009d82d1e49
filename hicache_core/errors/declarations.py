"""Errors of what was declared, named or combined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hicache_core.errors.base import HiCacheError


class SpecError(HiCacheError):
    """A declaration (pool, buffer, geometry, platform) contradicts itself."""

    code = "spec"


class PluginError(HiCacheError):
    """A plugin was refused; the registry is what it was before."""

    code = "plugin"


class UnknownNameError(HiCacheError):
    """A model, variant, platform, layout, io_backend or family of that name does not exist here."""

    code = "unknown-name"


class ModelFileError(HiCacheError):
    """A model file cannot be read or does not follow the schema."""

    code = "model-file"


class PoolsFileError(HiCacheError):
    """A file of hand-made pools cannot be read or does not follow its form; names the file and the key."""

    code = "pools-file"


class TraceError(HiCacheError):
    """A trace cannot be read; names the file and, where one is at fault, the line (1-based)."""

    code = "trace"

    def __init__(self, *, path: str, line: int | None, got: str, expected: str, remedy: str) -> None:
        self.path = path
        self.line = line
        where = path if line is None else f"{path}:{line}"
        super().__init__(who=where, got=got, expected=expected, remedy=remedy)


class ByteSizeError(HiCacheError):
    """A text is no number of bytes.

    Attributes:
        text: what was given.
    """

    code = "byte-size"

    def __init__(self, *, who: str, text: str, expected: str, remedy: str) -> None:
        self.text = text
        super().__init__(who=who, got=repr(text), expected=expected, remedy=remedy)


class Reason(Protocol):
    """Why a combination cannot work."""

    @property
    def id(self) -> str:
        """Rule and reason code."""

    @property
    def pool(self) -> str:
        """The pool that breaks it, or empty."""


class IncompatibleError(HiCacheError):
    """A combination of platform, io_backend, layout and pools cannot work; carries every reason.

    Attributes:
        violations: the reasons.
        nearest: the nearest combination that works for the whole group; None where none is known.
    """

    code = "incompatible"

    def __init__(
        self, *, who: str, violations: Sequence[Reason], remedy: str, nearest: object | None = None
    ) -> None:
        self.violations = tuple(violations)
        self.nearest = nearest
        super().__init__(
            who=who,
            got="; ".join(str(violation) for violation in self.violations),
            expected="a combination that every pool serves",
            remedy=remedy,
        )


class BufferMismatchError(HiCacheError):
    """A device buffer is not what its declaration says: row bytes, layers, device, stride or dtype."""

    code = "buffer-mismatch"
