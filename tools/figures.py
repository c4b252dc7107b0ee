"""`make figures`: write figures/ and results/results.csv from code and from the kept records."""

import sys
from pathlib import Path
import matplotlib.pyplot as plt
from aim_nb.report.drawings import draw_aim, draw_applying_aims
from aim_nb.core import atomic_write
from aim_nb.engine.records import kept_dir, read_records
from aim_nb.report.figures import all_figures, save_fig
from aim_nb.report.schema import results_csv

FIGURES = Path(__file__).resolve().parent.parent / "figures"


def write(records, folder):
    "Write every picture that the records can draw; return their names."
    figures = {"AIM": draw_aim(), "applying_aims": draw_applying_aims(), **all_figures(records)}
    for name, fig in figures.items():
        save_fig(fig, name, folder)
        plt.close(fig)
    return list(figures)


def main():
    records = read_records()
    names = write(records, FIGURES)
    atomic_write(kept_dir() / "results.csv", results_csv(records))
    stale = sorted(p.name for p in FIGURES.iterdir() if p.suffix in (".png", ".svg") and p.stem not in names)
    print(f"figures: {', '.join(names)}")
    if stale:
        sys.exit(f"figures: no record draws {', '.join(stale)}; remove them or keep their records")


if __name__ == "__main__":
    main()
