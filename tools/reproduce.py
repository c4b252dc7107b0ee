"""`make reproduce DATASET=glyphs BUDGET=smoke`: every experiment notebook on one dataset, then every table and figure and the report, all under runs/."""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from figures import write

ROOT = Path(__file__).resolve().parent.parent
CONTINUAL = {"cifar-fs": "cifar100"}  # the paper's name for the same images in its other part


def grid():
    "The paper's shots and the whole grids of its ablations, also where a notebook's own default is less."
    from aim_nb.paper import paper_table

    def listed(table, name):
        return ",".join(map(str, sorted({row[name] for row in paper_table(table)})))

    return {
        "shots": listed("few-shot", "n_shot"),
        "K_values": listed("active_mech", "K"),
        "l_values": listed("sto_count", "l"),
    }


def values(path, dataset, budget, known):
    "What a notebook is to be run with: of all that is wanted, the parameters that it has."
    wanted = {
        "dataset": CONTINUAL.get(dataset, dataset) if path.stem[0] == "3" else dataset,
        "budget": budget,
        **grid(),
    }
    return [word for name, value in wanted.items() if name in known for word in ("-p", name, value)]


def write_tables(records, folder):
    "Every table that the records fill as a file in `folder`; return their names. The same records make the same files."
    from aim_nb.core import atomic_write
    from aim_nb.report.tables import table_files

    files = table_files(records)
    for name, text in files.items():
        atomic_write(folder / name, text)
    return list(files)


def run(notebooks, dataset, budget):
    "Run the notebooks one after the other; return the names of those that failed."
    from aim_nb.engine.notebook_runs import parameters_of

    failed = []
    for path in notebooks:
        code = subprocess.run(
            [Path(sys.executable).parent / "aim-nb", "run", path, *values(path, dataset, budget, parameters_of(path))],
            cwd=ROOT,
        ).returncode
        if code == 130:
            sys.exit(130)
        failed += [path.stem] if code else []
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="omniglot, cifar-fs, mini-imagenet or glyphs")
    parser.add_argument("budget", help="smoke, quick, paper or paper@N")
    args = parser.parse_args()
    from aim_nb.engine.notebook_runs import check_values, parameters_of, spell
    from aim_nb.core import AimError, runs_dir
    from aim_nb.report.tables import report_text
    from aim_nb.engine.records import kept_dir, read_records, records_dir

    try:
        check_values(vars(args))
    except AimError as e:
        sys.exit(f"reproduce: {e}")
    began = time.time()
    experiments = [p for p in sorted((ROOT / "nbs").glob("[23][0-9]_*.ipynb")) if "budget" in parameters_of(p)]
    failed = run(experiments, args.dataset, args.budget)
    records = read_records(
        kept_dir(), records_dir(), budget=args.budget, dataset={args.dataset, CONTINUAL.get(args.dataset, args.dataset)}
    )
    names, tables = write(records, runs_dir() / "figures"), write_tables(records, runs_dir() / "tables")
    print(report_text(records))
    print(
        f"reproduce: {len(records)} records, {len(tables)} files in tables/, {len(names)} figures, under {runs_dir()}, {spell(time.time() - began)}"
    )
    if failed:
        sys.exit(f"reproduce: failed: {', '.join(failed)}; run the same command again to go on")


if __name__ == "__main__":
    main()
