"""`make figures`: write figures/ from code and from the kept records, one file for each label of the paper that has them."""
from pathlib import Path
from aim_nb.drawings import draw_aim, draw_applying_aims
from aim_nb.viz import save_fig

FIGURES = Path(__file__).resolve().parent.parent / "figures"


def main():
    for name, draw in {"AIM": draw_aim, "applying_aims": draw_applying_aims}.items():
        print(*(p.name for p in save_fig(draw(), name, FIGURES)))


if __name__ == "__main__": main()
