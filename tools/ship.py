"""`python tools/ship.py RECORD.json`: the model of a finished run as a file of the package. float16 where that leaves the test accuracy as it is, else float32; prints the row for the card in aim_nb/weights/README.md."""

import argparse, hashlib, sys
from pathlib import Path

import torch
from aim_nb.engine import activation
from aim_nb.engine import train_continual
from aim_nb.engine import train_fewshot
from aim_nb.engine.checkpoints import save_tensors
from aim_nb.core import AimError
from aim_nb.config import Budget, Protocol
from aim_nb.engine.metatest import metatest
from aim_nb.engine.evaluate import evaluate
from aim_nb.engine.loop import load_module
from aim_nb.engine.pretrain import feature_bank, pretrained_backbone
from aim_nb.engine.records import read_record

WEIGHTS = Path(__file__).resolve().parent.parent / "aim_nb" / "weights"
SAME = 0.05  # points of accuracy: what a table with one decimal does not show
LIMIT = 20e6  # bytes of all shipped files


def fewshot_again(record):
    "Layer and head of a record, and a function that asks them the record's own test episodes: a `Score`."
    q, b, protocol = record["parameters"], Budget(**record["budget"]), Protocol(**record["protocol"])
    bank, (layer, head) = activation.bank_of(record), train_fewshot.load_fewshot(record)
    net, _ = pretrained_backbone(bank, q["backbone"], b, seed=q["backbone_seed"])
    features = feature_bank(net, bank, ("test",))
    episodes = train_fewshot.fixed_episodes(features, "test", b.test_episodes, q["n_way"], q["n_shot"], q["n_query"])
    ways = dict(
        adapt=protocol.adapt and record["method"] != "sib",
        lr=train_fewshot.paper_rates().nu_in,
        decision="soft" if protocol.decision == "soft-test" else None,
    )
    return layer, head, lambda: evaluate(layer, head, features.tensor("test"), episodes, **ways)


def fewshot_test(record):
    "tensors -> accuracy on the record's own test episodes."
    layer, head, ask = fewshot_again(record)

    def test(tensors):
        for module, prefix in ((layer, "layer."), (head, "head.")):
            load_module(module, tensors, prefix)
        return ask().mean

    return test


def continual_test(record):
    "tensors -> accuracy of the record's own meta-test, after the most classes."
    net, trained = train_continual.load_continual(record)

    def test(tensors):
        load_module(net, tensors, "net.")
        return metatest(net, trained.bank, trained.norm, trained.protocol, trained.budget, trained.seed)["accuracy"]

    return test


def halved(tensors):
    return {k: v.half() if v.dtype == torch.float32 else v for k, v in tensors.items()}


def choose(record, tensors):
    "The tensors to ship, their accuracy, and what was found."
    test = {"fewshot": fewshot_test, "continual": continual_test}[record["task"]](record)
    full, half = test(tensors), test(halved(tensors))
    print(
        f"accuracy: the record says {record['metrics']['accuracy']:.3f}, float32 gives {full:.3f}, float16 {half:.3f}"
    )
    if abs(full - record["metrics"]["accuracy"]) > SAME:
        raise AimError("these weights do not give the record's accuracy; run the experiment again.")
    return (halved(tensors), half, "float16") if abs(half - full) <= SAME else (tensors, full, "float32")


def ship(record, into):
    "Write the file; its path and the card's row."
    checkpoints = {"fewshot": train_fewshot, "continual": train_continual}[record["task"]].training_checkpoints(record)
    is_last = record["task"] == "continual" and record["protocol"]["weights"] == "last"
    step = record["metrics"]["last_step" if is_last else "best_step"]  # whose weights gave the record's accuracy
    saved = checkpoints.weights(step)
    if saved is None:
        raise AimError(
            f"the weights of step {step:,} of run {record['key']} are not under {checkpoints.dir}; run it again to have them."
        )
    tensors, accuracy, kind = choose(record, saved.tensors)
    shots = f"-{record['parameters']['n_shot']}shot" if record["task"] == "fewshot" else ""
    path = into / f"{record['dataset']}-{record['method']}{shots}-{checkpoints.dir.name.rpartition('-')[2]}.safetensors"
    meta = dict(
        step=saved.step, identity=checkpoints.identity, meta=saved.meta, accuracy=accuracy, dtype=kind, record=record
    )
    size = sum(t.numel() * t.element_size() for t in tensors.values()) + sum(
        p.stat().st_size for p in into.glob("*.safetensors") if p != path
    )
    if size > LIMIT:
        raise AimError(
            f"with this file the shipped weights would be {size / 1e6:.1f} MB, {LIMIT / 1e6:.0f} at most; ship a narrower network."
        )
    save_tensors(path, tensors, meta)
    return path, row(path, record, tensors, accuracy, kind)


def row(path, record, tensors, accuracy, kind):
    "The line of the card."
    b, q = record["budget"], record["parameters"]
    width = f", {b['width']} channels instead of 112 (narrow: not the paper's network)" if b["width"] else ""
    network = f"{record['method']}, M={q['M']}, K={q['K']}, l={q['l']}{width}, {sum(t.numel() for t in tensors.values()):,} numbers, {kind}"
    measured = (
        f"{q['n_way']}-way {q['n_shot']}-shot test"
        if record["task"] == "fewshot"
        else f"{record['metrics']['n_classes'][-1]} classes, test images, {record['metrics']['update']} moves"
    )
    return f"| `{path.name}` | {network} | {record['dataset']}, seed {record['seed']} | {b['name']}, {b['steps']:,} steps | {accuracy:.2f} % ({measured}) | `{hashlib.sha256(path.read_bytes()).hexdigest()}` |"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", help="the JSON file of a run with AIM whose checkpoints are under $AIM_RUNS")
    parser.add_argument("--into", type=Path, default=WEIGHTS, help="where the file goes")
    args = parser.parse_args()
    try:
        record = read_record(args.record)
        if not record["method"].endswith("+aim"):
            raise AimError(
                f"{record['method']} has no AIM; models with AIM are shipped, backbones come from 63_pretrain."
            )
        path, line = ship(record, args.into)
    except AimError as e:
        sys.exit(f"ship: {e}")
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB); its row for the card:\n{line}")


if __name__ == "__main__":
    main()
