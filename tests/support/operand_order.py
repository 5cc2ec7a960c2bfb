"""Print, for each contraction kernel in a folder of sources, how many values of k that follow each
other a thread brings to an operand of a matrix instruction, and the instruction: one JSON line.

    python -m support.operand_order FOLDER CAPABILITY NAME ...

A process of its own, because another test may have set Triton to interpret.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tilewright.targets.nvidia.build import compile_launch, load_source


def main(folder: str, capability: str, *names: str) -> None:
    for name in names:
        for launch in load_source(Path(folder) / f"{name}.py").LAUNCHES:
            if launch["kernel"].__name__ == "contract":
                made = compile_launch(launch, int(capability))
                widths = sorted({int(w) for w in re.findall(r"kWidth = (\d+)", made.asm["ttgir"])})
                found = sorted(set(re.findall(r"(mma\.sync|wgmma)\.", made.asm["ptx"])))
                print(json.dumps([name, widths, found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
