"""The bars, and which of them the stored results miss."""
from __future__ import annotations

FLOOR, RELEASE, CONVS = 3., 1.3, .7       # AIM's share over its floor; the reference's time over the release's; convolutions over those in a large batch


def row_misses(r) -> list:
    "What one row misses, in words."
    out = []
    if "ratio" in r and "bar" in r and r["ratio"]["median"] < r["bar"]: out.append(f"{r['ratio']['median']:.1f}x, bar {r['bar']}x")
    if r.get("reference_of_release", 0) > RELEASE: out.append(f"the reference takes {r['reference_of_release']:.2f} of the release's time (at most {RELEASE}): its ratio does not count")
    if "bar" in r and r.get("share_of_floor", 0) > FLOOR: out.append(f"AIM's share is {r['share_of_floor']:.1f}x its floor, bar {FLOOR:.0f}x")
    if "bar" in r and r.get("conv_of_large_batch", 1) < CONVS: out.append(f"convolutions at {100 * r['conv_of_large_batch']:.0f} % of a large batch's rate, bar {100 * CONVS:.0f} %")
    if "growth" in r and "bar" in r and r["growth"] > r["bar"]: out.append(f"grows {r['growth']:.2f}x, bar {r['bar']}x")
    if "value" in r and "bar" in r and (r["value"] > r["bar"]) == r["at_most"]: out.append(f"{r['value']:.3g} {r['unit']}, bar {'at most' if r['at_most'] else 'at least'} {r['bar']}")
    if "bar" in r and not r.get("steady", True): out.append("the machine was not steady: run it again")
    return [f"MISS {r['case']}: {o}" for o in out]


def misses(rows) -> list:
    "Every missed bar as a sentence."
    return [m for r in rows for m in row_misses(r)]
