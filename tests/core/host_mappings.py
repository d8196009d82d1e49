"""What the kernel says of the host memory of this process: mappings, pages, descriptors."""

from __future__ import annotations

import os
import re
from pathlib import Path

from attrs import frozen

from hicache_core.memory.allocation import MEMFD_NAME


@frozen(kw_only=True)
class Mapping:
    """One mapping, as the kernel lists it; it may hold several neighbours with the same flags."""

    start: int
    end: int
    name: str
    size: int
    resident: int
    flags: tuple[str, ...]

    @property
    def ours(self) -> bool:
        """Whether it is host memory of the core: kept out of children, or its shared memory."""
        return "dc" in self.flags or f"memfd:{MEMFD_NAME}" in self.name


def mappings(process: int | str = "self") -> list[Mapping]:
    """Every mapping of a process."""
    text = Path(f"/proc/{process}/smaps").read_text(encoding="utf-8")
    heads = list(re.finditer(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ *(.*)$", text, re.MULTILINE))
    ends = [*(head.start() for head in heads[1:]), len(text)]
    found = []
    for head, end in zip(heads, ends, strict=True):
        body = text[head.end() : end]
        kilobytes = {name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB", body, re.MULTILINE)}
        flags = re.search(r"^VmFlags: (.*)$", body, re.MULTILINE)
        found.append(
            Mapping(
                start=int(head[1], 16),
                end=int(head[2], 16),
                name=head[3],
                size=kilobytes["Size"] << 10,
                resident=kilobytes["Rss"] << 10,
                flags=tuple(flags[1].split()) if flags else (),
            )
        )
    return found


def our_mappings() -> list[Mapping]:
    """The mappings of host memory that the core made."""
    return [mapping for mapping in mappings() if mapping.ours]


def our_bytes() -> int:
    """Bytes of host memory that the core has mapped; as :func:`our_mappings`, and faster."""
    total = size = 0
    name = ""
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("Size:"):
                size = int(line.split()[1]) << 10
            elif line.startswith("VmFlags:"):
                total += size if " dc" in line or f"memfd:{MEMFD_NAME}" in name else 0
            elif line[0] in "0123456789abcdef":
                name = line
    return total


def flags_at(address: int) -> tuple[str, ...]:
    """The flags of the mapping that holds an address; empty where nothing is mapped."""
    return next((m.flags for m in mappings() if m.start <= address < m.end), ())


def descriptors() -> set[tuple[int, str]]:
    """The open descriptors and what each is, this call's own left out."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            continue
    return found
