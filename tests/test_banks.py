"""Banks: every source, and everything that can be wrong with one."""

import errno
import gzip
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import warnings
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from aim_nb.data import sources as sources

from aim_nb.data.files import PARTS, load_bank, write_bank
from aim_nb.data.sources import find_source, read_pickle
from aim_nb.data.banks import bank_dir, check_bank, list_banks, open_bank, prepare_bank
from aim_nb.core import AimError, content_key, numpy_rng, worker_env
from aim_nb.config import DATASETS
from aim_nb.paper import class_split
from aim_nb.data.tasks import policy

pytestmark = pytest.mark.filterwarnings("ignore:.*checksum of.*:UserWarning")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


# ---- toy datasets: the layout of the real ones, a few images a class


def png(page, **kw):
    f = io.BytesIO()
    Image.fromarray(page).save(f, "PNG", **kw)
    return f.getvalue()


def drawings(n=3, each=4, side=105, start=0):
    "{alphabet/character: [picture files]}; the position of the bar tells class and drawing."
    out = {}
    for i in range(start, start + n):
        pages = np.full((each, side, side), 255, np.uint8)
        for j in range(each):
            pages[j, 8 * i : 8 * i + 6, j : 60 + j] = 0
        out[f"Alphabet{i}/character0{i % 3 + 1}"] = [png(p) for p in pages]
    return out


@pytest.fixture
def omniglot(tmp_path, monkeypatch):
    "A root with a toy Omniglot as zips."
    toy = {"images_background": drawings(5), "images_evaluation": drawings(3, start=5)}
    names = [n for part in toy.values() for n in part]
    monkeypatch.setitem(
        sources.EXPECT,
        "omniglot",
        dict(images_background=5, images_evaluation=3, each=4, side=105, names=content_key(names), val=2),
    )
    (tmp_path / "omniglot-py").mkdir()
    for part, chars in toy.items():
        with zipfile.ZipFile(tmp_path / "omniglot-py" / f"{part}.zip", "w", zipfile.ZIP_DEFLATED) as z:
            for name, files in chars.items():
                for j, data in enumerate(files):
                    z.writestr(f"{part}/{name}/{j:02}.png", data)
            z.writestr(f"__MACOSX/{part}/Alphabet0/character01/._00.png", b"rubbish")
    return tmp_path


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    "A root with a toy CIFAR-100 folder: 2 training images and 1 test image a class, as Python 2 pickled them."
    monkeypatch.setitem(sources.EXPECT, "cifar100", dict(train=2, test=1))
    names = sorted(sum(class_split("cifar-fs").values(), []))
    (tmp_path / "cifar-100-python").mkdir()
    for part, n in dict(train=2, test=1).items():
        y = numpy_rng(part).permutation(np.repeat(np.arange(100), n))
        x = np.repeat(np.stack([y, y + 100, np.arange(len(y)) % 50], 1), 1024, 1).astype(
            np.uint8
        )  # planes: class, class + 100, a number
        d = {"data": x, "fine_labels": y.tolist(), "filenames": [f"{i}.png" for i in y]}
        (tmp_path / "cifar-100-python" / part).write_bytes(python2(d))
    (tmp_path / "cifar-100-python" / "meta").write_bytes(python2({"fine_label_names": names}))
    return tmp_path


def python2(obj):
    "A pickle as Python 2 wrote it: protocol 2, byte strings, numpy.core."

    class P(pickle._Pickler):
        dispatch = dict(pickle._Pickler.dispatch)

        def save_str(self, s):
            b = s.encode("latin1")
            self.write(b"T" + len(b).to_bytes(4, "little") + b)
            self.memoize(s)

        dispatch[str] = save_str

        def save_bytes(self, b):
            self.write(b"T" + len(b).to_bytes(4, "little") + b)
            self.memoize(b)

        dispatch[bytes] = save_bytes

    f = io.BytesIO()
    P(f, 2).dump(obj)
    return f.getvalue().replace(b"cnumpy._core.multiarray", b"cnumpy.core.multiarray")


MINI_FILES = {
    "cache pickles": [f"mini-imagenet/mini-imagenet-cache-{part}.pkl" for part in PARTS],
    "category-split pickles": [
        f"mini-imagenet/miniImageNet_category_split_{part}.pickle" for part in ("train_phase_train", "val", "test")
    ],
    "images and csv files": [f"mini-imagenet/{part}.csv" for part in PARTS],
}


def mini_toy(root, form, monkeypatch, each=10, side=6):
    "A toy mini-ImageNet in one of its three forms; pixels tell the class and the image."
    monkeypatch.setitem(sources.EXPECT, "mini-imagenet", dict(each=each, side=side))
    names = sorted(sum(class_split("mini-imagenet").values(), []))
    (root / "mini-imagenet").mkdir(parents=True, exist_ok=True)
    for part, file in zip(PARTS, MINI_FILES[form]):
        mine = class_split("mini-imagenet")[part]
        y = np.repeat([names.index(c) for c in mine], each)
        x = np.zeros((len(y), side, side, 3), np.uint8)
        x[..., 0] = 2 * y[:, None, None]
        x[..., 1] = 20 * np.tile(np.arange(each), len(mine))[:, None, None]
        if form == "cache pickles":
            data = pickle.dumps(
                {"image_data": x, "class_dict": {names[c]: np.flatnonzero(y == c).tolist() for c in set(y.tolist())}}
            )
        elif form == "category-split pickles":
            data = python2({"data": x, "labels": y.tolist(), "catname2label": {names[c]: c for c in set(y.tolist())}})
        else:
            (root / "mini-imagenet" / "images").mkdir(exist_ok=True)
            rows = [(f"{names[c]}{i:08}.jpg", names[c]) for i, c in enumerate(y.tolist())]
            for (f, _), image in zip(rows, x):
                Image.fromarray(image).save(root / "mini-imagenet" / "images" / f, "PNG")  # lossless, whatever its name
            data = "\n".join(["filename,label", *(",".join(r) for r in rows)]).encode()
        (root / file).write_bytes(data)
    return root


FLOATS = b"Pf 4 4 -1\n" + np.ones(16, "<f4").tobytes()


@pytest.fixture
def pictures(tmp_path):
    "Somebody's own pictures."
    for part, classes in dict(train="abc", val="d", test="ef").items():
        for c in classes:
            (tmp_path / "own" / part / c).mkdir(parents=True)
            for i in range(4):
                Image.fromarray(numpy_rng(c, i).integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(
                    tmp_path / "own" / part / c / f"{i}.png"
                )
    return tmp_path


def files(root):
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if not p.name.endswith(".lock"))


def refused(root, *what, call=None, name="omniglot"):
    "The call raises one `AimError` of one line with these words, and the tree stays as it was."
    before = files(root)
    with pytest.raises(AimError) as e:
        (call or (lambda: prepare_bank(name, root, download=False)))()
    assert "\n" not in str(e.value) and all(w in str(e.value) for w in what), str(e.value)
    assert files(root) == before
    return str(e.value)


# ---- sources


def test_omniglot_zips_and_folders_agree(omniglot):
    with pytest.warns(UserWarning, match="not the official one"):
        a = open_bank("omniglot", omniglot)
    assert a.shape == (28, 28, 1) and len(a.labels) == 32
    assert a.class_names[:2] == ["Alphabet0/character01", "Alphabet1/character02"]
    assert a.splits == dict(train=[0, 1, 2], val=[3, 4], test=[5, 6, 7]) and a.class_names[-1].startswith("Alphabet7/")
    assert a.images.max() == 255 and a.images.min() == 0 and a.images[0].mean() > 200  # ink on paper
    page = np.full((105, 105), 255, np.uint8)
    page[16:22, 1:61] = 0  # class 2, drawing 1
    assert (a.images[9, :, :, 0] == np.asarray(Image.fromarray(page).resize((28, 28), Image.Resampling.LANCZOS))).all()
    for part in ("images_background", "images_evaluation"):
        z = omniglot / "omniglot-py" / f"{part}.zip"
        with zipfile.ZipFile(z) as f:
            f.extractall(omniglot / "omniglot-py")
        z.unlink()
    b = prepare_bank("omniglot", omniglot, force=True)
    assert b.info["sha256"] == a.info["sha256"] and "no official checksum" in b.info["checksum"]


def test_official_checksum_is_recognised(omniglot, monkeypatch):
    zips = (omniglot / "omniglot-py").glob("*.zip")
    known = {f"omniglot-py/{z.name}": (None, hashlib.md5(z.read_bytes()).hexdigest()) for z in zips}
    monkeypatch.setattr(sources, "_official", lambda name: known)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bank = open_bank("omniglot", omniglot)
    assert bank.info["checksum"] == "The files have the official checksums."


def test_cifar_folder_and_archive_agree(cifar, tmp_path_factory):
    with pytest.warns(UserWarning, match="train, test, meta is not the official one"):
        a = open_bank("cifar100", cifar)
    assert (
        a.images.shape == (300, 32, 32, 3)
        and (a.images[:, 5, 7, 0] == a.labels).all()
        and (a.images[:, 5, 7, 1] == a.labels + 100).all()
    )
    assert a.split.tolist() == [0, 0, 1] * 100 and [len(a.classes(p)) for p in PARTS] == [60, 10, 30]
    other = tmp_path_factory.mktemp("archive")
    with tarfile.open(other / "cifar-100-python.tar.gz", "w:gz") as t:
        t.add(cifar / "cifar-100-python", "cifar-100-python")
    with pytest.warns(UserWarning, match="cifar-100-python.tar.gz is not the official one"):
        b = open_bank("cifar100", other)
    assert b.sha == a.sha


def test_cifar_fs_is_cifar100_with_its_own_classes(cifar):
    fs = open_bank("cifar-fs", cifar)
    c100 = open_bank("cifar100", cifar)
    assert fs.info["sha256"] == c100.info["sha256"] and fs.sha != c100.sha
    for part, names in class_split("cifar-fs").items():
        assert sorted(fs.class_names[c] for c in fs.classes(part)) == sorted(names)
    assert fs.name == "cifar-fs" and (fs.images == c100.images).all() and not (cifar / "cifar-fs").exists()
    assert prepare_bank("cifar-fs", cifar, force=True).sha == fs.sha
    shutil.rmtree(cifar / "cifar-100-python")
    assert open_bank("cifar-fs", cifar).sha == fs.sha  # from the bank alone
    rows = {r["name"]: r for r in list_banks(cifar)}
    assert rows["cifar-fs"]["state"] == "ready" and rows["cifar-fs"]["sha"] == fs.sha != rows["cifar100"]["sha"]
    assert "64 / 16 / 20 classes" in next(f["detail"] for f in check_bank("cifar-fs", cifar) if f["check"] == "splits")


def test_cifar_fs_has_the_hash_that_records_carry():
    "Kept records are found by the hash of their data."
    if not os.environ.get("AIM_DATA") or not (bank_dir("cifar100") / "bank.json").exists():
        pytest.skip("no bank of cifar100 below $AIM_DATA")
    records = Path(__file__).parents[1].glob("results/fewshot/cifar-fs/*paper*.json")
    assert {json.loads(p.read_text())["data_sha"] for p in records} == {open_bank("cifar-fs").sha}


def test_three_forms_of_mini_imagenet_agree(tmp_path, monkeypatch):
    made = {}
    for i, form in enumerate(MINI_FILES):
        root = mini_toy(tmp_path / str(i), form, monkeypatch)
        assert find_source("mini-imagenet", root)[0] == form
        made[form] = open_bank("mini-imagenet", root)
        assert made[form].info["source"] == form
    a = made["cache pickles"]
    assert (a.images[:, 0, 0, 0] == 2 * a.labels).all() and (
        a.images[:, 0, 0, 1].reshape(100, 10) == 20 * np.arange(10)
    ).all()
    assert a.split.reshape(100, 10)[0].tolist() == [0] * 9 + [1]
    assert len({b.sha for b in made.values()}) == 1
    for part, names in class_split("mini-imagenet").items():
        assert sorted(a.class_names[c] for c in a.classes(part)) == sorted(names)
    assert (tmp_path / "2" / "mini-imagenet" / "images").is_dir()  # the source beside the bank is untouched


def test_category_split_without_names_is_numbered_by_label(tmp_path, monkeypatch):
    root = mini_toy(tmp_path, "category-split pickles", monkeypatch)
    want = open_bank("mini-imagenet", root).sha
    for f in MINI_FILES["category-split pickles"]:
        d = read_pickle((root / f).read_bytes(), f)
        del d["catname2label"]
        (root / f).write_bytes(pickle.dumps(d))
    with pytest.warns(UserWarning, match="no class names"):
        assert prepare_bank("mini-imagenet", root, force=True).sha == want


def test_larger_pictures_are_reduced(tmp_path, monkeypatch):
    root = mini_toy(tmp_path, "images and csv files", monkeypatch)
    monkeypatch.setitem(sources.EXPECT, "mini-imagenet", dict(each=10, side=3))
    assert open_bank("mini-imagenet", root).shape == (3, 3, 3)


def test_own_pictures(pictures):
    bank = open_bank(f"folder:{pictures}/own", pictures)
    assert (
        bank.shape == (84, 84, 3)
        and bank.class_names == list("abcdef")
        and bank.splits == dict(train=[0, 1, 2], val=[3], test=[4, 5])
    )
    assert bank.split.tolist() == [0, 0, 0, 1] * 6
    small = open_bank(f"folder:{pictures}/own@16", pictures)
    assert (
        small.shape == (16, 16, 3)
        and open_bank(small_dir := bank_dir(f"folder:{pictures}/own@16", pictures).name, pictures).sha == small.sha
    )
    (pictures / "own" / "train" / "a" / "notes.txt").write_text("no picture")
    assert bank_dir(f"folder:{pictures}/own@16", pictures).name == small_dir  # only pictures count
    (pictures / "own" / "train" / "a" / "0.png").unlink()
    assert len(open_bank(f"folder:{pictures}/own@16", pictures).labels) == 23


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda own: shutil.rmtree(own / "val"), ["no folder 'val'"]),
        (lambda own: shutil.rmtree(own / "val" / "d"), ["holds no pictures"]),
        (lambda own: shutil.copytree(own / "train" / "a", own / "test" / "a"), ["'a' stands in two", "disjoint"]),
        (lambda own: (own / "train" / "a" / "0.png").write_bytes(b"not a picture"), ["0.png is damaged"]),
        (
            lambda own: (own / "train" / "a" / "0.png").write_bytes((own / "train" / "a" / "1.png").read_bytes()[:300]),
            ["0.png is damaged"],
        ),
        (lambda own: (own / "train" / "a" / "0.ppm").write_bytes(FLOATS), ["floating-point"]),
    ],
)
def test_bad_own_pictures(pictures, spoil, words):
    spoil(pictures / "own")
    refused(pictures, *words, name=f"folder:{pictures}/own")


def test_a_bank_of_any_path_has_a_short_and_safe_name(pictures):
    for path in ("x" * 200, "my pictures", "Vögel", "a@b:c"):
        (pictures / "own").rename(pictures / path)
        bank = open_bank(f"folder:{pictures / path}@16", pictures)
        assert re.fullmatch("folder-[0-9a-f]{12}", bank.name)
        assert open_bank(bank.name, pictures).sha == bank.sha and policy(bank.name) == policy("folder:any")
        (pictures / path).rename(pictures / "own")


@pytest.mark.parametrize("path", ["", "\n", "x" * 300, "~nosuchuser/own", "a\0b", "x@" + "9" * 5000])
def test_a_path_that_cannot_be_is_one_sentence(tmp_path, path):
    for use in (prepare_bank, open_bank, check_bank, bank_dir):
        said = refused(tmp_path, call=partial(use, f"folder:{path}", tmp_path))
        assert path.strip() or "write folder:PATH" in said


@pytest.mark.parametrize("form", ["png", "pgm"])
def test_grey_pictures_of_16_bits_are_scaled(pictures, form):
    ramp = np.linspace(0, 65535, 16 * 16).reshape(16, 16).astype(np.uint16)
    for file in (pictures / "own").glob("*/*/*"):
        file.unlink()
        data = b"P5 16 16 65535\n" + ramp.astype(">u2").tobytes() if form == "pgm" else png(ramp)
        file.with_suffix(f".{form}").write_bytes(data)
    bank = open_bank(f"folder:{pictures}/own@16", pictures)
    assert abs(bank.images / 255 - ramp[..., None] / 65535).max() < 1 / 255


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda own: os.mkfifo(own / "train" / "a" / "9.png"), ["9.png is not a regular file", "refused"]),
        (lambda own: (own / "train" / "a" / "9.png").symlink_to("/dev/zero"), ["9.png is a link out of", "refused"]),
        (lambda own: (own / "train" / "a" / "9.png").symlink_to(own.parent / "key.png"), ["is a link out of"]),
        (lambda own: (own / "train" / "z").symlink_to(own.parent), ["is a link out of"]),
        (lambda own: (own / "test" / "e" / "9.png").symlink_to("9.png"), ["9.png"]),
    ],
)
def test_links_out_pipes_and_devices_are_refused(pictures, spoil, words):
    (pictures / "key.png").write_bytes(b"secret")
    (pictures / "own" / "train" / "a" / "again.png").symlink_to("0.png")  # inside, and so welcome
    assert len(open_bank(f"folder:{pictures}/own@16", pictures).labels) == 25
    spoil(pictures / "own")
    error = str(answer(lambda: open_bank(f"folder:{pictures}/own@16", pictures).sha))
    assert "\n" not in error and all(w in error for w in words)


def test_glyphs_are_found_by_name(tmp_path, monkeypatch):
    toy = dict(
        images=np.arange(6 * 784, dtype=np.uint32).reshape(6, 28, 28, 1).astype(np.uint8),
        labels=[0, 0, 1, 1, 2, 2],
        split=[0, 1] * 3,
        class_names=list("xyz"),
        splits=dict(train=[0], val=[1], test=[2]),
        source="toy",
    )
    monkeypatch.setitem(
        sys.modules, "aim_nb.data.glyphs", type("glyphs", (), {"build_glyphs": staticmethod(lambda: toy)})
    )
    assert list_banks(tmp_path)[DATASETS.index("glyphs")]["state"] == "can be made"
    assert (open_bank("glyphs", tmp_path).images == toy["images"]).all()


# ---- what is missing


def test_missing_dataset_says_what_to_do(tmp_path):
    for name in ("omniglot", "cifar100", "cifar-fs", "mini-imagenet"):
        for call in (open_bank, check_bank):
            words = (str(tmp_path), "Looked for", "-p dataset glyphs", "AIM_DATA")
            refused(tmp_path, *words, call=partial(call, name, tmp_path))
    refused(tmp_path, "omniglot-py/images_{background,evaluation}[.zip]", "aim-nb data prepare omniglot")
    refused(
        tmp_path,
        "mini-imagenet-cache-{train,val,test}.pkl",
        "{images,train.csv,val.csv,test.csv}",
        "category_split_{train_phase_train,val,test}.pickle",
        name="mini-imagenet",
    )
    refused(tmp_path, "'imagenet'", "cifar-fs", "folder:PATH", name="imagenet")
    refused(tmp_path, "folder:PATH", name="folder-0123456789ab")


def serve(monkeypatch, download_url):
    "Let `download_url` stand for torchvision's."
    sources.import_torchvision()
    monkeypatch.setattr("torchvision.datasets.utils.download_url", download_url)


def test_failed_download_is_one_error(tmp_path, monkeypatch):
    serve(monkeypatch, Mock(side_effect=OSError("Name or service not known")))
    for name in ("omniglot", "cifar-fs"):
        (tmp_path / "omniglot-py").mkdir(exist_ok=True)
        words = ("could not be downloaded", "-p dataset glyphs", "http")
        refused(tmp_path, *words, call=partial(prepare_bank, name, tmp_path))


def test_download_is_used(omniglot, monkeypatch, tmp_path_factory):
    new = tmp_path_factory.mktemp("new")
    got = []

    def copy(url, folder, name, md5):
        shutil.copy(omniglot / "omniglot-py" / name, folder)
        got.append(url)

    serve(monkeypatch, copy)
    assert prepare_bank("omniglot", new).sha == open_bank("omniglot", omniglot).sha and len(got) == 2


def test_fetch_keeps_nothing_of_a_wrong_file(tmp_path, monkeypatch):
    "Against a server of our own on this machine."
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "a.zip").write_bytes(b"not what was asked for")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/a.zip"
    try:
        monkeypatch.setattr(sources, "_official", lambda name: {"x/b.zip": (url, "0" * 32)})
        with pytest.raises(AimError, match="could not be downloaded"):
            sources.fetch("omniglot", tmp_path)
        assert files(tmp_path) == ["a.zip", "x"]
        md5 = hashlib.md5((tmp_path / "a.zip").read_bytes()).hexdigest()
        monkeypatch.setattr(sources, "_official", lambda name: {"x/b.zip": (url, md5)})
        sources.fetch("omniglot", tmp_path)
        assert files(tmp_path) == ["a.zip", "x", "x/b.zip"]
    finally:
        server.shutdown()
        server.server_close()


# ---- what is wrong


def rezip(path, change):
    "Write a zip again with its {name: bytes} changed."
    with zipfile.ZipFile(path) as z:
        members = {n: z.read(n) for n in z.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for n, data in members.items():
            z.writestr(n, data)


FIRST = "images_background/Alphabet0/character01/00.png"
BOMB = png(np.zeros((9000, 9000), np.uint8))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda m: m.pop(FIRST), ["drawings of class Alphabet0/character01 should be 4, found 3"]),
        (lambda m: [m.pop(n) for n in list(m) if "Alphabet1/" in n], ["characters should be 5, found 4"]),
        (
            lambda m: m.update({n.replace("Alphabet1/", "Alphabet9/"): m.pop(n) for n in list(m) if "Alphabet1/" in n}),
            ["class names"],
        ),
        (lambda m: m.update({FIRST: png(np.zeros((100, 100), np.uint8))}), ["(105, 105), found (100, 100)"]),
        (lambda m: m.update({FIRST: m[FIRST][:50]}), ["00.png is damaged"]),
        (lambda m: m.update({FIRST: b"GIF?"}), ["00.png is damaged"]),
        (lambda m: m.update({FIRST: BOMB}), ["9000 x 9000", "refused"]),
        (lambda m: m.update({"../../evil.png": b"x"}), ["'../../evil.png'", "refused"]),
        (lambda m: m.update({"/tmp/evil.png": b"x"}), ["'/tmp/evil.png'", "refused"]),
        (lambda m: m.update({"a\\..\\..\\evil.png": b"x"}), ["refused"]),
        (lambda m: m.update({"C:\\evil.png": b"x"}), ["refused"]),
    ],
)
def test_wrong_zip_is_refused(omniglot, change, words):
    rezip(omniglot / "omniglot-py" / "images_background.zip", change)
    refused(omniglot, *words)


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.9, 0.999, "all but a byte"])
def test_damaged_zip_is_refused(omniglot, keep):
    z = omniglot / "omniglot-py" / "images_background.zip"
    data = bytearray(z.read_bytes())
    if keep == "all but a byte":
        data[120] ^= 255
        z.write_bytes(data)
        refused(omniglot, "damaged")
    else:
        z.write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
        refused(omniglot, "images_background.zip is damaged or incomplete", "get it again")


def test_zip_bomb_is_refused(omniglot, monkeypatch):
    monkeypatch.setitem(sources.BIG, "member", 1 << 20)
    rezip(
        omniglot / "omniglot-py" / "images_background.zip",
        lambda m: m.update({"images_background/bomb/character01/00.png": bytes(2 << 20)}),
    )
    refused(omniglot, "2,097,152 bytes", "refused")
    monkeypatch.setitem(sources.BIG, "member", 1 << 30)
    monkeypatch.setitem(sources.BIG, "total", 1 << 20)
    refused(omniglot, "more than this dataset can hold")


def test_truncated_and_foreign_archives_are_refused(cifar):
    with tarfile.open(cifar / "cifar-100-python.tar.gz", "w:gz") as t:
        t.add(cifar / "cifar-100-python", "cifar-100-python")
    shutil.rmtree(cifar / "cifar-100-python")
    path = cifar / "cifar-100-python.tar.gz"
    data = path.read_bytes()
    for n in (0, 100, len(data) // 2, len(data) - 200):
        path.write_bytes(data[:n])
        refused(cifar, "damaged", name="cifar100")
    with tarfile.open(path, "w:gz") as t:
        info = tarfile.TarInfo("../evil")
        info.size = 1
        t.addfile(info, io.BytesIO(b"x"))
    refused(cifar, "'../evil'", "refused", name="cifar100")
    with tarfile.open(path, "w:gz") as t:
        t.addfile(tarfile.TarInfo("readme"))
    refused(cifar, "lacks the file 'train'", name="cifar-fs")


def repickle(path, **changes):
    d = read_pickle(path.read_bytes(), path)
    d.update(changes)
    path.write_bytes(pickle.dumps(d))


@pytest.mark.parametrize(
    "spoil, words",
    [
        (
            lambda d: repickle(d / "train", fine_labels=[0] * 200),
            ["train images of class apple should be 2, found 200"],
        ),
        (lambda d: repickle(d / "train", fine_labels=[0] * 199), ["number of labels"]),
        (lambda d: repickle(d / "train", data=np.zeros((200, 3071), np.uint8)), ["the shape of the data"]),
        (lambda d: repickle(d / "train", data=np.zeros((200, 3072))), ["float64"]),
        (lambda d: repickle(d / "train", fine_labels="labels"), ["damaged"]),
        (lambda d: repickle(d / "meta", fine_label_names=["cat", "dog"]), ["the class names"]),
        (lambda d: (d / "meta").write_bytes(pickle.dumps([1, 2])), ["should hold a dictionary"]),
        (lambda d: (d / "train").write_bytes((d / "train").read_bytes()[:9000]), ["damaged"]),
        (lambda d: (d / "train").write_bytes(b""), ["damaged"]),
        (lambda d: (d / "test").unlink(), ["lacks the file 'test'"]),
    ],
)
def test_wrong_cifar_is_refused(cifar, spoil, words):
    spoil(cifar / "cifar-100-python")
    assert len(refused(cifar, *words, name="cifar100")) < 500


@pytest.mark.parametrize(
    "form, spoil, words",
    [
        (
            "cache pickles",
            lambda d: repickle(d / "mini-imagenet-cache-val.pkl", class_dict={"n0": [0]}),
            ["the val classes"],
        ),
        (
            "cache pickles",
            lambda d: repickle(d / "mini-imagenet-cache-val.pkl", image_data=np.zeros((5, 6, 6, 3), np.uint8)),
            ["damaged"],
        ),
        (
            "cache pickles",
            lambda d: repickle(d / "mini-imagenet-cache-val.pkl", image_data=np.zeros((160, 5, 5, 3), np.uint8)),
            ["type and shape"],
        ),
        (
            "category-split pickles",
            lambda d: repickle(d / "miniImageNet_category_split_val.pickle", labels=[64] * 160),
            ["should be 10"],
        ),
        ("images and csv files", lambda d: next((d / "images").iterdir()).unlink(), ["No such file"]),
        ("images and csv files", lambda d: (d / "val.csv").write_text("a,b\n1,2"), ["damaged"]),
        (
            "images and csv files",
            lambda d: (d / "val.csv").write_text((d / "val.csv").read_text().replace("\nn0", "\n../n0", 1)),
            ["outside the image folder"],
        ),
        (
            "images and csv files",
            lambda d: (d / "val.csv").write_text("\n".join((d / "val.csv").read_text().split("\n")[:-1])),
            ["should be 10, found 9"],
        ),
    ],
)
def test_wrong_mini_imagenet_is_refused(tmp_path, monkeypatch, form, spoil, words):
    spoil(mini_toy(tmp_path, form, monkeypatch) / "mini-imagenet")
    assert len(refused(tmp_path, *words, name="mini-imagenet")) < 4000


# ---- pickles that are programs


class Evil:
    def __init__(self, f, *args):
        self.call = f, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "make",
    [
        lambda mark: Evil(os.mkdir, mark),
        lambda mark: Evil(eval, f"__import__('os').mkdir({mark!r})"),
        lambda mark: Evil(subprocess.check_call, ["mkdir", mark]),
        lambda mark: {"data": np.array([Evil(os.mkdir, mark)], dtype=object)},
        lambda mark: {"data": [Evil(Path, mark)]},
        lambda mark: {Evil(os.mkdir, mark): 1},
        lambda mark: {"data": Evil(getattr, "data", "upper")},
        lambda mark: Evil(np.load, mark),
        lambda mark: Evil(np.memmap, mark, "uint8", "w+", 0, 1),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_malicious_pickle_is_refused_and_nothing_runs(cifar, make, protocol):
    mark = cifar / "pwned"
    (cifar / "cifar-100-python" / "train").write_bytes(pickle.dumps(make(str(mark)), protocol))
    refused(cifar, "refused", name="cifar100")
    assert not mark.exists()


def test_pickle_tricks(tmp_path):
    "Names hidden in dots, huge shapes, bytes of the wrong length, protocol-4 globals."
    dots = b"\x80\x04\x8c\x05numpy\x8c\x0cndarray.view\x93."
    ext = b"\x80\x02\x82\x01."
    short = pickle.dumps({"a": np.zeros(100, np.uint8)}, 2).replace(bytes(100), bytes(50))
    huge = b"\x80\x02cnumpy\nndarray\n(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft\x85R."
    for data in (dots, ext, huge):
        with pytest.raises(AimError):
            read_pickle(data, "x")
    with pytest.raises(AimError, match="damaged"):
        read_pickle(short, "x")
    with pytest.raises(AimError, match="type object"):
        read_pickle(pickle.dumps({"a": np.zeros(3)}).replace(b"f8", b"O8"), "x")


def test_plain_pickles_of_every_protocol():
    d = {
        "u": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "f": np.asfortranarray(np.eye(3)),
        "s": np.array(["a", "bc"]),
        "big": np.arange(3, dtype=">i4"),
        "n": np.float32(2),
        "l": [np.int64(3), b"x", None, True],
        "e": np.zeros((0, 4)),
    }
    for protocol in range(6):
        back = read_pickle(pickle.dumps(d, protocol), "x")
        for k in ("u", "f", "s", "big", "e"):
            assert (
                type(back[k]) is np.ndarray
                and back[k].dtype.newbyteorder("=") == d[k].dtype.newbyteorder("=")
                and (back[k] == d[k]).all()
                and back[k].shape == d[k].shape
            )
        assert back["n"] == 2 and back["l"] == d["l"]


# ---- small files that would take for ever


def answer(call, seconds=20):
    "What `call` returns or the error it raises, in a process that is killed after some seconds."
    here, there = fork.Pipe(duplex=False)

    def run():
        try:
            there.send(call())
        except AimError as e:
            there.send(e)

    p = fork.Process(target=run)
    p.start()
    there.close()
    try:
        assert here.poll(seconds), "no answer"
        return here.recv()
    finally:
        p.kill()
        p.join()


def tar_of(path, *headers):
    "A .tar.gz of headers alone: (name, size, type)."
    blocks = []
    for name, size, kind in headers:
        info = tarfile.TarInfo(name)
        info.size = size
        info.type = kind
        blocks.append(info.tobuf(tarfile.GNU_FORMAT))
    path.write_bytes(gzip.compress(b"".join(blocks) + bytes(1024)))


def test_tar_with_a_negative_size_is_refused(tmp_path):
    for kind in (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.XHDTYPE):
        tar_of(tmp_path / "cifar-100-python.tar.gz", ("train", -512, kind))
        error = answer(lambda: prepare_bank("cifar-fs", tmp_path, download=False).sha)
        assert "claims -512 bytes" in str(error) and "refused" in str(error)


def test_tar_of_many_members_is_refused(tmp_path, monkeypatch):
    "Two million take a minute to list, so none is listed twice, and folders and links count, too."
    path = tmp_path / "cifar-100-python.tar.gz"
    tar_of(path, *[("train", 0, tarfile.REGTYPE)] * 9)
    refused(tmp_path, "'train' twice", name="cifar100")
    monkeypatch.setitem(sources.BIG, "members", 100)
    for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.XGLTYPE):
        tar_of(path, *[("a", 0, kind)] * 101)
        refused(tmp_path, "more than this dataset can hold", name="cifar100")


@pytest.mark.parametrize("file", ["train", "meta"])
@pytest.mark.parametrize("wrap", [lambda x: x, tuple, lambda x: {"a": x}])
def test_pickle_of_a_billion_elements_is_refused(cifar, file, wrap):
    nested = [0] * 10
    for _ in range(8):
        nested = [nested] * 10
    keys = dict.fromkeys(("data", "fine_labels", "fine_label_names"), wrap(nested))
    for protocol in (0, 2, 4):
        data = pickle.dumps(keys, protocol)
        assert len(data) < 10_000
        (cifar / "cifar-100-python" / file).write_bytes(data)
        assert "refused" in str(answer(lambda: prepare_bank("cifar100", cifar).sha))


def test_an_empty_array_of_a_trillion_rows_is_refused(cifar):
    hollow = {"fine_label_names": np.zeros((10**12, 0), np.uint8)}
    for protocol in (2, 5):
        (cifar / "cifar-100-python" / "meta").write_bytes(pickle.dumps(hollow, protocol))
        assert "empty array" in str(answer(lambda: prepare_bank("cifar100", cifar).sha))


def test_pickle_with_a_nested_key_is_refused():
    "Hashing this key would take 2**60 steps, and the deep one the whole C stack."
    wide = b"\x80\x02}" + b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(60)) + b"K\x01s."
    deep = b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s."
    for data in (wide, deep):
        assert "refused" in str(answer(partial(read_pickle, data, "x.pkl")))


def test_pickle_of_many_instructions_is_refused(monkeypatch):
    monkeypatch.setitem(sources.BIG, "instructions", 1000)
    with pytest.raises(AimError, match="more instructions"):
        read_pickle(b"\x80\x02}(" + b"]" * 2000 + b".", "x.pkl")


def test_rows_of_mini_imagenet_are_counted_before_they_are_copied(tmp_path, monkeypatch):
    root = mini_toy(tmp_path, "cache pickles", monkeypatch)
    path = root / "mini-imagenet" / "mini-imagenet-cache-val.pkl"
    d = read_pickle(path.read_bytes(), path)
    name = min(d["class_dict"])
    d["class_dict"][name] = bytearray(1 << 20)  # a million times row 0
    d["image_data"] = np.zeros((160, 84, 84, 3), np.uint8)
    path.write_bytes(pickle.dumps(d, 5))
    assert "should be 10, found 1048576" in str(answer(lambda: prepare_bank("mini-imagenet", root).sha))


@pytest.mark.parametrize(
    "name, file",
    [
        ("cifar100", "cifar-100-python.tar.gz"),
        ("omniglot", "omniglot-py/images_background.zip"),
        ("mini-imagenet", "mini-imagenet/mini-imagenet-cache-train.pkl"),
    ],
)
def test_pipes_and_files_too_large_are_refused(tmp_path, name, file):
    for path in (*MINI_FILES["cache pickles"], "omniglot-py/images_evaluation.zip"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    assert "not a regular file" in str(answer(lambda: prepare_bank(name, tmp_path).sha))
    (tmp_path / file).unlink()
    with open(tmp_path / file, "wb") as f:
        f.truncate(1 << 40)  # a hole
    assert "1,099,511,627,776 bytes" in str(answer(lambda: prepare_bank(name, tmp_path).sha))


# ---- the disk

fork = multiprocessing.get_context("fork")  # a second process without a second import of torch


def with_little_room(name, root, pipe):
    "Build under a limit of the file size: the kernel refuses the write half-way, as on a full disk."
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        pipe.send(open_bank(name, root).sha)
    except Exception as e:
        pipe.send(f"{type(e).__name__}: {e}")


def test_full_disk_leaves_nothing(pictures):
    before = files(pictures)
    here, there = fork.Pipe()
    p = fork.Process(target=with_little_room, args=(f"folder:{pictures}/own", pictures, there))
    p.start()
    assert here.poll(60) and here.recv().startswith("AimError: The disk is full")
    p.join(60)
    assert files(pictures) == before
    assert open_bank(f"folder:{pictures}/own", pictures).shape == (84, 84, 3)


def test_full_disk_at_every_write(pictures, monkeypatch):
    "Whichever sync fails, there is no bank, no rubbish, and the old bank still opens."
    want = open_bank(f"folder:{pictures}/own@16", pictures).sha
    real = os.fsync
    before = files(pictures)
    for fail_at in range(4):
        for side, force in ((16, True), (20, False)):
            fsync = Mock(side_effect=[None] * fail_at + [OSError(errno.ENOSPC, "No space left on device")])
            monkeypatch.setattr(os, "fsync", fsync)
            with pytest.raises(AimError, match="disk is full"):
                prepare_bank(f"folder:{pictures}/own@{side}", pictures, force=force)
        monkeypatch.setattr(os, "fsync", real)
        assert files(pictures) == before and open_bank(f"folder:{pictures}/own@16", pictures).sha == want


def test_unwritable_root_is_one_error(tmp_path, pictures):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(AimError, match="AIM_DATA"):
        open_bank(f"folder:{pictures}/own", tmp_path / "file" / "root")


def build_slowly(name, root, pipe):
    "Say `built` for each picture read, and at the end what the bank holds."
    real = sources._square

    def slow(file, side):
        pipe.send("built")
        time.sleep(0.02)
        return real(file, side)

    sources._square = slow
    bank = open_bank(name, root)
    pipe.send((bank.sha, int(np.asarray(bank.images, dtype=np.int64).sum())))
    pipe.close()


def start(pictures):
    here, there = fork.Pipe(duplex=False)
    p = fork.Process(target=build_slowly, args=(f"folder:{pictures}/own@16", pictures, there))
    p.start()
    there.close()
    return p, here


def drain(pipe):
    out = []
    while pipe.poll(60):
        try:
            out.append(pipe.recv())
        except EOFError:
            return out


def test_concurrent_builds_do_not_corrupt(pictures):
    "Three processes want the same bank: one builds it, the others wait, all read the same."
    started = [start(pictures) for _ in range(3)]
    outs = [drain(pipe) for _, pipe in started]
    for p, _ in started:
        p.join(60)
    assert (
        len({out[-1] for out in outs}) == 1
        and [f["level"] for f in check_bank(f"folder:{pictures}/own@16", pictures)].count("problem") == 0
    )
    assert sorted(out.count("built") for out in outs) == [0, 0, 24]


def test_readers_see_whole_banks_while_one_is_replaced(pictures, tmp_path):
    "A bank is rewritten over and over with another content; whoever opens it meets one content or the other."
    parts = dict(labels=[0, 0, 1, 1], split=[0, 1, 0, 1], class_names=["a", "b"], source="toy")
    kinds = [
        dict(images=np.full((4, 3, 3, 1), i, np.uint8), splits=dict(train=[i], val=[], test=[1 - i])) for i in (0, 1)
    ]

    def write_on():
        for i in range(60):
            write_bank(tmp_path / "x", "x", **parts, **kinds[i % 2])

    write_bank(tmp_path / "x", "x", **parts, **kinds[0])
    p = fork.Process(target=write_on)
    p.start()
    seen = []
    while p.is_alive():
        bank = load_bank(tmp_path / "x")
        seen.append(bank.images[0, 0, 0, 0] == bank.splits["train"][0])
    p.join(60)
    assert p.exitcode == 0 and seen and all(seen)


def test_killed_build_is_swept_by_the_next(pictures):
    before = files(pictures)
    p, pipe = start(pictures)
    assert pipe.poll(60) and [pipe.recv() for _ in range(10)] == ["built"] * 10
    p.kill()
    p.join(60)
    left = set(files(pictures)) - set(before)
    assert left and not any(f.endswith("bank.json") and ".part" not in f for f in left)
    bank = open_bank(f"folder:{pictures}/own@16", pictures)
    assert (
        sorted(f.name for f in bank_dir(f"folder:{pictures}/own@16", pictures).iterdir())
        == ["bank.json", "images.npy", "labels.npy", "split.npy"]
        and len(bank.labels) == 24
    )


# ---- opening and the doctor


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda d: os.truncate(d / "images.npy", 700), []),
        (lambda d: os.truncate(d / "images.npy", 0), []),
        (lambda d: (d / "labels.npy").unlink(), ["No such file"]),
        (lambda d: np.save(d / "labels.npy", np.zeros(24, np.int32)), ["labels.npy is not what bank.json says"]),
        (lambda d: np.save(d / "split.npy", np.zeros(23, np.uint8)), ["split.npy"]),
        (lambda d: np.save(d / "labels.npy", np.zeros(24, np.int64)), ["at least one image"]),
        (lambda d: (d / "bank.json").write_text("{"), []),
        (lambda d: (d / "bank.json").write_text("{}"), []),
        (
            lambda d: np.save(
                d / "images.npy", np.array([Evil(os.mkdir, str(d / "pwned"))], dtype=object), allow_pickle=True
            ),
            [],
        ),
        (lambda d: edit(d, version=99), ["format", "99"]),
        (lambda d: edit(d, splits=dict(train=[0, 1], val=[1], test=[2])), ["disjoint"]),
        (lambda d: edit(d, class_names=["a"]), []),
        (lambda d: edit(d, splits=dict(train=[0], val=[1], test=[77])), ["does not have"]),
        (lambda d: edit(d, splits=[]), []),
        (lambda d: edit(d, shape="x"), []),
        (lambda d: edit(d, sha256=None, name=None, labels=3, shape=[]), []),
    ],
)
def test_damaged_bank_is_refused_and_can_be_rebuilt(pictures, spoil, words):
    name = f"folder:{pictures}/own@16"
    want = open_bank(name, pictures).sha
    dir = bank_dir(name, pictures)
    spoil(dir)
    with pytest.raises(AimError) as e:
        open_bank(name, pictures)
    assert (
        all(w in str(e.value) for w in [*words, "aim-nb data prepare"])
        and "\n" not in str(e.value)
        and not (dir / "pwned").exists()
    )
    assert [f["level"] for f in check_bank(name, pictures)] == ["problem"]
    assert next(r for r in list_banks(pictures) if r["name"] == dir.name)["state"] == "damaged"
    assert prepare_bank(name, pictures).sha == want


def edit(dir, **changes):
    info = json.loads((dir / "bank.json").read_text())
    info.update(changes)
    (dir / "bank.json").write_text(json.dumps(info))


def test_doctor_finds_what_is_there(tmp_path):
    x = numpy_rng("doctor").integers(0, 256, (12, 5, 5, 1), dtype=np.uint8)
    x[3] = 7
    x[5] = x[0]
    x[11] = x[10]
    parts = dict(
        labels=np.repeat([0, 1, 2], 4),
        split=[0, 0, 0, 1] * 3,
        class_names=list("abc"),
        splits=dict(train=[0], val=[1], test=[2]),
        source="toy",
    )
    write_bank(tmp_path / "glyphs", "glyphs", x, **parts)
    found = {f["check"]: f for f in check_bank("glyphs", tmp_path)}
    assert {k: f["level"] for k, f in found.items()} == dict(
        source="ok", counts="ok", splits="ok", checksums="ok", **{"empty images": "note", "duplicates": "note"}
    )
    assert found["empty images"]["rows"] == [3] and found["duplicates"]["groups"] == [[0, 5], [10, 11]]
    assert (
        "2 (1 across classes, 1 across class splits, 1 across train and test images)" in found["duplicates"]["detail"]
    )
    assert found["counts"]["per_class"] == dict(a=4, b=4, c=4)
    for name in ("images", "labels", "split"):
        path = tmp_path / "glyphs" / f"{name}.npy"
        good = path.read_bytes()
        path.write_bytes(good[:-8] + bytes([good[-8] ^ 1]) + good[-7:])
        report = check_bank("glyphs", tmp_path)
        assert any(f["level"] == "problem" for f in report), name
        path.write_bytes(good)
    assert not any(f["level"] == "problem" for f in check_bank("glyphs", tmp_path))


def test_opening_reads_no_images(pictures):
    bank = open_bank(f"folder:{pictures}/own@16", pictures)
    assert isinstance(bank.images, np.memmap) and not bank.images.flags.writeable
    assert load_bank(bank_dir(f"folder:{pictures}/own@16", pictures)).sha == bank.sha


def test_write_bank_refuses_what_does_not_fit(tmp_path):
    parts = dict(
        images=np.zeros((4, 2, 2, 1), np.uint8),
        labels=[0, 0, 1, 1],
        split=[0, 1, 0, 1],
        class_names=["a", "b"],
        splits=dict(train=[0], val=[], test=[1]),
        source="",
    )
    for change in (
        dict(labels=[0, 1, 0, 1]),
        dict(labels=[0, 0, 0, 0]),
        dict(labels=[0, 0, 2, 2]),
        dict(split=[0]),
        dict(images=np.zeros((3, 2, 2, 1), np.uint8)),
        dict(images=[np.zeros((2, 2, 2, 1), np.uint8), np.zeros((2, 3, 2, 1), np.uint8)]),
        dict(splits=dict(train=[0], val=[0], test=[1])),
        dict(splits=dict(train=[0], val=[], test=[2])),
    ):
        refused(tmp_path, call=partial(write_bank, tmp_path / "x", "x", **{**parts, **change}))
    write_bank(tmp_path / "x", "x", **parts)
    assert len(files(tmp_path)) == 5


# ---- torchvision


def test_import_torchvision_in_a_fresh_process():
    "Plain import first; the declarations only when it fails for that one reason."
    code = """
        import sys, importlib, torch
        from aim_nb.data import sources as sources
        assert "torchvision" not in sys.modules and not sources._DECLARED
        tv = sources.import_torchvision()
        import torchvision.datasets, torchvision.transforms.v2
        assert tv is torchvision is sources.import_torchvision() and tv.datasets.Omniglot and len(sources._DECLARED) <= 1"""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=worker_env()
    )
    assert not done.returncode, done.stderr


def test_import_torchvision_declares_only_for_the_known_failure(monkeypatch):
    monkeypatch.setattr(sources.importlib, "import_module", Mock(side_effect=RuntimeError("something else")))
    monkeypatch.setattr(sources, "_DECLARED", [])
    with pytest.raises(RuntimeError, match="something else"):
        sources.import_torchvision()
    assert not sources._DECLARED


# ---- the real thing, where it is

REAL = {
    "omniglot": (1623, 20, (28, 28, 1), (901, 63, 659), 5),
    "cifar100": (100, 600, (32, 32, 3), (60, 10, 30), 100),
    "cifar-fs": (100, 600, (32, 32, 3), (64, 16, 20), 100),
    "mini-imagenet": (100, 600, (84, 84, 3), (64, 16, 20), 60),
}


@pytest.mark.parametrize("name", REAL)
def test_real_data(name):
    if not os.environ.get("AIM_DATA"):
        pytest.skip("AIM_DATA is not set")
    if not (bank_dir(name) / "bank.json").exists() and not find_source(name):
        pytest.skip(f"{name} is not below $AIM_DATA")
    classes, each, shape, split, test = REAL[name]
    bank = open_bank(name)
    assert (
        bank.shape == shape and len(bank.class_names) == classes and tuple(len(bank.classes(p)) for p in PARTS) == split
    )
    assert (np.bincount(bank.labels) == each).all() and (np.bincount(bank.labels, bank.split) == test).all()
    assert bank.class_names[:1] == (
        ["Alphabet_of_the_Magi/character01"] if name == "omniglot" else ["apple"] if "cifar" in name else ["n01532829"]
    )
    if name == "omniglot":
        alphabets = [n.split("/")[0] for n in bank.class_names]
        assert len(set(alphabets)) == 50 and len(set(alphabets[:964])) == 30 and bank.images[:2000].mean() > 200
    if name == "cifar100":
        mean = np.mean([bank.images[r].mean((0, 1, 2)) for r in bank.class_rows("all", "train")], 0) / 255
        assert np.allclose(mean, (0.50707516, 0.48654887, 0.44091784), atol=1e-6)


@pytest.mark.parametrize("name", [n for n in REAL if n != "mini-imagenet"])
def test_doctor_on_real_data(name):
    if not os.environ.get("AIM_DATA") or not (bank_dir(name) / "bank.json").exists():
        pytest.skip(f"no bank of {name} below $AIM_DATA")
    assert not [f for f in check_bank(name) if f["level"] == "problem"]
