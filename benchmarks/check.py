"""The bars, and which of them the stored results miss."""

from __future__ import annotations

STEP = {"256->400": 5, "640->800": 9, "1600->800": 9}
EPISODE = {"256->400": 20, "640->800": 40, "1600->800": 40}
TRAINING = {f"training step sib+aim {s} 1-shot": bar for s, bar in STEP.items()}
FASTER = {  # times faster than the plain way
    **TRAINING,
    **{f"{case}, 2 threads": bar for case, bar in TRAINING.items()},
    **{f"test episode {s}": bar for s, bar in EPISODE.items()},
    "outer step oml+aim omniglot, release switches": 3,
    "outer step oml+aim cifar, release switches": 5,
    "outer step anml+aim omniglot, release switches": 10,
    "inner loop oml+aim omniglot, features given": 20,
    "meta-test step oml+aim omniglot, exact Adam": 20,
}
AT_MOST = {  # in the row's own unit
    "paper run sib+aim": 25,  # minutes for the 50,000 steps of CIFAR-FS
    "paper run sib+aim, peak memory": 2,
    "paper run, sib+linear over sib+aim": 2,
    "meta-test of 600 classes oml+aim omniglot, peak memory beside the model": 4,
    "import aim_nb.aim after torch": 0.3,
    "outer step oml+aim omniglot, per-image norm over affine": 1.15,
}
AT_LEAST = {"convolutions of the outer step oml+aim omniglot": 0.7, "convolutions of the outer step oml+aim cifar": 0.7}
BARS = {  # (case, what of it): which way, bar. Every one of them must be among the results
    **{(c, "ratio"): (">=", bar) for c, bar in FASTER.items()},
    **{(c, "reference_of_release"): ("<=", 1.3) for c in FASTER},
    **{(c, "value"): ("<=", bar) for c, bar in AT_MOST.items()},
    **{(c, "value"): (">=", bar) for c, bar in AT_LEAST.items()},
    ("sampling 5-way 1-shot", "per_second"): (">=", 5000),
}
WORDS = dict(
    ratio="{:.1f}x",
    reference_of_release="the reference takes {:.2f} of the release's time, so that its ratio does not count",
    value="{:.3g}",
    per_second="{:.0f} a second",
)


def bar_of(r) -> str:
    "Which way and how far the main number of a row must go; nothing if anything will do."
    return next(
        (
            "{} {}".format(*BARS[r["case"], what]) + unit
            for what, unit in dict(ratio="x", value="", per_second="/s").items()
            if what in r and (r["case"], what) in BARS
        ),
        "",
    )


def miss(r, what, way, bar) -> str:
    "What a row lacks for one bar, in words; nothing if it meets it."
    if what not in r:
        return "never measured"
    if "plan" not in r:
        return "it is not noted with what it was measured: run it again"
    if r["plan"] != "full":
        return f"measured with plan {r['plan']}: run it in full"
    if not r["steady"]:
        return "the machine was not steady: run it again"
    x = r[what]["median"] if what == "ratio" else r[what]
    return "" if (x >= bar if way == ">=" else x <= bar) else WORDS[what].format(x) + f", bar {way} {bar}"


def misses(rows) -> list:
    "Every missed bar as a sentence."
    found = {r["case"]: r for r in rows}
    sentences = {
        f"MISS {case}: {words}": 0
        for (case, what), bar in BARS.items()
        if (words := miss(found.get(case, {}), what, *bar))
    }
    return list(sentences)  # each once
