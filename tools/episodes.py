"""`python tools/episodes.py RECORD.json ...`: gives few-shot records from before `hits` what each test episode came to, by the weights under $AIM_RUNS. A record is changed only if these answer as they did: their mean must be its accuracy."""

import sys
from pathlib import Path

from aim_nb.core import AimError
from aim_nb.engine.evaluate import pack_hits
from aim_nb.engine.records import read_record, save_record, sealed
from ship import fewshot_again


def with_hits(record):
    "The record and what each of its test episodes came to."
    q, m, (*_, ask) = record["parameters"], record["metrics"], fewshot_again(record)
    score = ask()
    if abs(score.mean - m["accuracy"]) > 1e-3:
        raise AimError(
            f"the weights here answer {score.mean:.3f} % where record {record['key']} has {m['accuracy']:.3f} %; it stays as it is."
        )
    return sealed(record | {"metrics": m | {"hits": pack_hits(score.accuracy, q["n_way"] * q["n_query"])}})


def main(paths):
    failed = 0
    for path in map(Path, paths):
        try:
            record = read_record(path)
            if record["task"] == "fewshot" and "hits" not in record["metrics"]:
                print(save_record(with_hits(record), path.parent).name, flush=True)
        except AimError as e:
            failed += 1
            print(f"episodes: {e}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
