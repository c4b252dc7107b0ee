"""`make reproduce DATASET=glyphs BUDGET=smoke`: every experiment notebook on one dataset, then every figure and the report, all under runs/."""
import argparse, subprocess, sys, time
from pathlib import Path
from figures import write

ROOT = Path(__file__).resolve().parent.parent
CONTINUAL = {"cifar-fs": "cifar100"} # the paper's name for the same images in its other part


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", help="omniglot, cifar-fs, mini-imagenet or glyphs")
    parser.add_argument("budget", help="smoke, quick, paper or paper@N")
    args = parser.parse_args()
    from aim_nb.cli import check_values, parameters_of, spell
    from aim_nb.core import AimError, runs_dir
    from aim_nb.records import read_records, records_dir
    from aim_nb.findings import report_text
    try: check_values(vars(args))
    except AimError as e: sys.exit(f"reproduce: {e}")
    began, failed = time.time(), []
    for path in sorted((ROOT / "nbs").glob("[23][0-9]_*.ipynb")):
        dataset = CONTINUAL.get(args.dataset, args.dataset) if path.stem[0] == "3" else args.dataset
        wanted = {"dataset": dataset, "budget": args.budget}
        pairs = [w for name, value in wanted.items() if name in parameters_of(path) for w in ("-p", name, value)]
        code = subprocess.run([Path(sys.executable).parent / "aim-nb", "run", path, *pairs], cwd=ROOT).returncode
        if code == 130: sys.exit(130)
        failed += [path.stem] if code else []
    records = read_records(records_dir(), budget=args.budget)
    names = write(records, runs_dir() / "figures")
    print(report_text(records))
    print(f"reproduce: {len(records)} records, {len(names)} figures under {runs_dir()}, {spell(time.time() - began)}")
    if failed: sys.exit(f"reproduce: failed: {', '.join(failed)}; run the same command again to go on")


if __name__ == "__main__": main()
