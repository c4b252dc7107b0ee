"""python -m benchmarks.norms SIZE REPEATS CLOCK: an outer step of OML+AIM with either norm, in turn; milliseconds as JSON."""
from __future__ import annotations

import json
import sys

from aim_nb.core import keep_memory, torch_rng
from aim_nb.oml import OML

from .continual import meta_batch, own_step
from .harness import CLOCK
from .layer import together


def main(size="full", repeats="5", clock="wall"):
    keep_memory()       # as `run_loop` does
    CLOCK[0] = clock
    shape, width, M = (1, 28, 28), *((8, 12) if size == "tiny" else (112, 64))
    x, y, T = meta_batch(shape, size == "tiny")
    steps = [own_step("oml", OML(shape, 1000, "aim", norm=norm, width=width, generator=torch_rng(0, "oml"), M=M, K=10, l=2).train(), x, y, T) for norm in ("affine", "instance")]
    affine, instance = together(steps, dict(seconds=0., repeats=int(repeats)))
    print(json.dumps(dict(affine_ms=affine, instance_ms=instance)))


if __name__ == "__main__": main(*sys.argv[1:])
