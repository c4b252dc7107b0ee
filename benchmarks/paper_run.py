"""python -m benchmarks.paper_run METHOD SIZE CLOCK: the parts of a whole run on Conv-4-64 CIFAR-FS sized features, timed; minutes and peak memory as JSON."""

from __future__ import annotations

import json
import sys

import numpy as np

from aim_nb.core import keep_memory, threads, torch_rng
from aim_nb.config import budget
from aim_nb.engine.pretrain import features_from_arrays
from aim_nb.sib import SIBHead
from aim_nb.engine.train_fewshot import FewshotTrainee, fixed_episodes, make_layer

from .few_shot import make_features
from .harness import CLOCKS, median, peak_gb


def banks(each):
    "64, 16 and 20 classes; training images in 10 views."

    def split(classes, views, seed):
        x, rows = make_features(256, classes, each * views, seed)
        return x.view(classes * each, views, 256).numpy(), np.repeat(np.arange(classes), each)

    return features_from_arrays(train=split(64, 10, 0), val=split(16, 1, 1), test=split(20, 1, 2))


def parts(t, n, test, now):
    "Seconds of a step (three times over `n` steps), of a validation and of a test."
    for i in range(n):
        t.step(i)
    times = []
    for k in range(1, 4):
        start = now()
        for i in range(k * n, (k + 1) * n):
            t.step(i)
        times.append((now() - start) / n)
    start = now()
    t.evaluate(n)
    validation = now() - start
    start = now()
    t.score("test", test)
    return times, validation, now() - start


def main(method, size="full", clock="wall"):
    keep_memory()  # as training does
    tiny, now = size == "tiny", CLOCKS[clock]
    b, features = budget("paper", "fewshot", "cifar-fs"), banks(30 if tiny else 600)
    layer = make_layer(method, 256)
    t = FewshotTrainee(
        layer,
        SIBHead(layer.d_out, generator=torch_rng(0, "head")),
        features,
        val_episodes=20 if tiny else b.val_episodes,
    )
    with threads(1):
        times, validation, testing = parts(
            t, 2 if tiny else 200, fixed_episodes(features, "test", 20 if tiny else b.test_episodes), now
        )  # as training does, too
    minutes = (b.steps * median(times) + b.steps / b.val_every * validation + 2 * testing) / 60
    print(
        json.dumps(
            dict(
                minutes=minutes,
                steps=b.steps,
                step_ms=1e3 * median(times),
                validation_s=validation,
                test_s=testing,
                memory_gb=peak_gb(),
            )
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
