"""`python tools/migrate.py FOLDER...`: records of format 1 as records of format 2, in place; and the shipped models that hold such records."""

import json, sys
from pathlib import Path

from aim_nb import train_continual, train_fewshot
from aim_nb.checkpoints import load_tensors, save_tensors
from aim_nb.core import Protocol
from aim_nb.records import record_name, sealed

WEIGHTS = Path(__file__).resolve().parent.parent / "aim_nb" / "weights"


def new_protocol(record) -> Protocol:
    "The switches of an old record, those that it could not name included."
    old = dict(record["protocol"])
    on_test = "release" in (old["metatest_rate"], old["protocol"])
    old["metatest_rate"] = "test" if on_test else "validation"
    task = record["budget"]["task"]
    if task == "continual":
        old["weights"] = record["parameters"].get("checkpoint", "best")
        old["aim_scale"] = "1/K" if old["gate"] == "sigmoid" else "1"
    module = {"continual": train_continual, "fewshot": train_fewshot}[task]
    return module.relevant(record["method"], Protocol(**old))


def migrated(record, keys) -> dict:
    "The record in format 2; `keys` maps old keys to new ones."
    protocol = new_protocol(record)
    parameters = {k: v for k, v in record["parameters"].items() if k != "checkpoint"}
    if record["task"] == "activation":
        parameters["of"] = keys[parameters["of"]]
        protocol = Protocol(**{**protocol.asdict(), "heatmap": record["protocol"]["heatmap"]})
    new = {**record, "format": 2, "protocol": protocol.asdict(), "parameters": parameters}
    if record["task"] == "continual":
        rows = record["history"]
        new["metrics"] = {**record["metrics"], "last_step": rows[-1]["step"], "died_at": 0, "rates_added": []}
        name, changed = train_continual.nearest_preset(record["dataset"], record["method"], protocol)
        new |= dict(preset=name, changed=changed)
    return sealed(new)


def migrate_folder(folder):
    old = {path: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))}
    old = {path: r for path, r in old.items() if r.get("format") == 1}
    keys = {}
    for path, record in sorted(old.items(), key=lambda item: item[1]["task"] == "activation"):
        if record["task"] == "activation" and record["parameters"]["of"] not in keys:
            print(f"dropped {path.name}: the record it belongs to is not kept")
            path.unlink()
            continue
        new = migrated(record, keys)
        keys[record["key"]] = new["key"]
        (Path(folder) / record_name(new)).write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
        if record_name(new) != path.name:
            path.unlink()
    print(f"{len(keys)} records of {folder} migrated")


def migrate_models():
    for path in WEIGHTS.glob("*+aim-*.safetensors"):
        tensors, meta = load_tensors(path)
        if meta["record"]["format"] != 1:
            continue
        record = migrated(meta["record"], {})
        module = {"continual": train_continual, "fewshot": train_fewshot}[record["task"]]
        checkpoints = module.training_checkpoints(record)
        stem = path.name.rpartition("-")[0]
        there = WEIGHTS / f"{stem}-{checkpoints.dir.name.rpartition('-')[2]}.safetensors"
        save_tensors(there, tensors, {**meta, "record": record, "identity": checkpoints.identity})
        path.unlink()
        print(f"{path.name} -> {there.name}")


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        migrate_folder(folder)
    migrate_models()
