"""What is done to images: pretraining, feature extraction; and how long it takes before anything happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import torch
import torch.nn.functional as F
from nbclient import NotebookClient
from torch import nn

from aim_nb.aim import count_parameters
from aim_nb.backbones import make_backbone
from aim_nb.core import torch_rng
from aim_nb.engine.pretrain import CosineClassifier, forward, frozen
from .authors import copy_weights

from .harness import CLOCK, CLOCKS, case, compare, median, seconds, steadily, value_row
from .work import MOMENTUM, convolutions, total


def plain_conv4(width=64):
    "Conv-4-64 as it is usually written."
    layers = []
    for i in range(4):
        layers += [
            nn.Conv2d(width if i else 3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten())


def learner(net, classes=64):
    "One step of classification, images in memory."
    classifier = CosineClassifier(256, classes, generator=torch_rng(0, "classifier"))
    opt = torch.optim.SGD(
        [*net.parameters(), *classifier.parameters()], lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4
    )

    def step(x, y):
        loss = F.cross_entropy(classifier(net(x)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()

    return step


@case("images")
def pretraining(plan):
    "A step on 64 images, and features of images, against Conv-4-64 in plain eager mode."
    B = 4 if plan["tiny"] else 64
    x, y = torch.randn(B, 3, 32, 32, generator=torch_rng(0, "x")), torch.randint(64, (B,), generator=torch_rng(0, "y"))
    net = make_backbone("conv4", (3, 32, 32), generator=torch_rng(0, "backbone"))
    plain, n_weights, linear = copy_weights(net, plain_conv4()), count_parameters(net), 256 * 64
    step, ref = learner(net.to(memory_format=torch.channels_last).train()), learner(plain.train())
    last = x.to(memory_format=torch.channels_last)
    rows = [
        compare(
            "pretraining step conv4 32 px",
            lambda: step(last, y),
            lambda: ref(x, y),
            plan,
            items=("images", B),
            work=total(
                convolutions(net, (3, 32, 32), B), dict(macs=3 * B * linear, bytes=MOMENTUM * (n_weights + linear))
            ),
        )
    ]
    net, plain = frozen(net), plain.eval()
    many = x.repeat(4, 1, 1, 1)
    work = total(
        convolutions(net, (3, 32, 32), len(many), back=False), dict(macs=0, bytes=4 * (n_weights + 256 * len(many)))
    )
    with torch.no_grad():
        return rows + [
            compare(
                "features conv4 32 px",
                lambda: forward(net, many.to(memory_format=torch.channels_last)),
                lambda: plain(many),
                plan,
                work=work,
                items=("images", len(many)),
            )
        ]


def start_up(code, times):
    "Seconds that a new process spends on `code`."
    timer = f"import time; now = time.{CLOCKS[CLOCK[0]].__name__}; t = now()\n{code}\nprint(now() - t)"
    return median(
        [
            float(
                subprocess.run(
                    [sys.executable, "-c", timer], capture_output=True, text=True, check=True
                ).stdout.split()[-1]
            )
            for _ in range(times)
        ]
    )


def to_the_banner():
    "20_fewshot in a new kernel, up to the cell that says what will be run."
    path = Path(__file__).parent.parent / "nbs/20_fewshot.ipynb"
    nb = nbformat.read(path, 4)
    nb.cells = nb.cells[: 1 + next(i for i, c in enumerate(nb.cells) if "summary" in c.metadata.get("tags", ()))]
    NotebookClient(nb, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()


@case("start-up")
def imports(plan):
    "What the package adds to `import torch`, and how long a new kernel takes to the banner of the few-shot notebook."
    n = 1 if plan["tiny"] else 7
    (torch_alone, aim), seen = steadily(
        lambda: (start_up("import torch", n), start_up("import torch; t = now(); import aim_nb.aim", n)), plan
    )
    yield value_row("import aim_nb.aim after torch", aim, "s", seen, torch_s=torch_alone)
    banner, seen = steadily(lambda: median([seconds(to_the_banner, clock="wall") for _ in range(n)]), plan)
    yield value_row(
        "20_fewshot in a new kernel, to its banner", banner, "s", seen | dict(clock="wall")
    )  # the kernel's processor time is not ours
