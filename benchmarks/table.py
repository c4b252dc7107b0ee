"""Rows as text."""

from __future__ import annotations

from .check import bar_of


def number(x):
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def comparison(r):
    a, b, ratio = r["ours_ms"]["median"], r["reference_ms"]["median"], r["ratio"]
    text = f"{number(a):>7} ms  reference {number(b):>7} ms  {ratio['median']:6.1f}x ({ratio['low']:.1f} to {ratio['high']:.1f})"
    if "per_second" in r:
        text += f"  {number(r['per_second'])} {r['items']}/s"
    if "reference_of_release" in r:
        text += f"  reference at {r['reference_of_release']:.2f} of the release's time"
    if "share_of_floor" in r:
        text += f"  AIM's share {number(r['share_ms'])} ms, {r['share_of_floor']:.1f}x its floor"
    if "bytes" in r:
        text += f"  {number(r['macs'] / 1e6)} MMAC at {100 * r['of_matmul']:.0f} % of matmul, {number(r['bytes'] / 1e6)} MB at {100 * r['of_bandwidth']:.0f} % of bandwidth"
    return text


def line(r) -> str:
    "One row of results as a line."
    if "ratio" in r:
        text = comparison(r)
    elif "at" in r:
        text = (
            ", ".join(f"{n}: {number(t)} ms" for n, t in zip(r["at"], r["ms"]))
            + f"  exponent {r['exponent']:.2f}  {r['growth']:.2f}x"
        )
    elif "ops" in r:
        text = f"{r['calls']:.0f} calls a step; " + ", ".join(
            f"{o['op']} {100 * o['share']:.0f} %" for o in r["ops"][:6]
        )
    else:
        text = f"{number(r['value'])} {r['unit']}"
    return (
        f"  {r['case']:<52} {text}"
        + (f"  bar {bar}" if (bar := bar_of(r)) else "")
        + ("" if r.get("steady") else "  UNSTEADY machine")
    )
