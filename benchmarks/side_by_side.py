"""A transfer result beside published figures of upstream, as a Markdown table on standard output.

The figures of upstream are those of ``published_upstream.json``: taken from elsewhere, not measured here.

    python benchmarks/side_by_side.py benchmarks/results/NAME.json
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).with_name("published_upstream.json")


def key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["direction"], cell["layers"], cell["row_bytes"], cell["pages"]


def main(path: str) -> None:
    result = json.loads(Path(path).read_text(encoding="utf-8"))
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    ours = {key(c): c for c in result["cells"] if c["layout"] == "page_first"}
    made = f"{result['device']}, {result['date']}, torch {result['torch']}"
    print(f"Ours: {made}, kernel + page_first, given token slots; measured.\n")
    print(f"Upstream: {published['about']}\n")
    print("| direction | layers | row | pages | ours submit, complete | upstream submit, complete | ratio |")
    print("|---|---|---|---|---|---|---|")
    ratios: dict[str, list[float]] = {}
    for cell in published["cells"]:
        mine = ours[key(cell)]
        ratio = cell["complete_us"] / mine["slots_complete_us"]
        ratios.setdefault(cell["direction"], []).append(ratio)
        figures = f"{mine['slots_submit_us']:.0f} / {mine['slots_complete_us']:.0f}"
        theirs = f"{cell['submit_us']} / {cell['complete_us']}"
        where = " | ".join(str(part) for part in key(cell))
        print(f"| {where} | {figures} | {theirs} | {ratio:.2f} |")
    print()
    for direction, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        slowest = f"slowest cell {min(values):.2f}"
        print(f"{direction}: upstream's completion over ours {mean:.2f} in geometric mean, {slowest}.\n")


if __name__ == "__main__":
    main(sys.argv[1])
