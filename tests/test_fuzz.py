"""Readers of files from anywhere, and AIM, under inputs that nobody chose: an answer or one clear sentence, never anything else, and nothing written or run."""

import gzip, io, json, os, pickle, resource, struct, tarfile, warnings, zipfile, zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from accidents import Child, tiny_bank, warm
from aim_nb.engine import records
from aim_nb.aim import AIM
from aim_nb.data.files import file_errors, load_bank
from aim_nb.data.sources import BIG, decode, open_files, read_pickle
from aim_nb.engine.checkpoints import Checkpoints, load_tensors, save_tensors
from aim_nb.core import AimError, numpy_rng, torch_rng
from aim_nb.config import Budget, Protocol
from test_banks import png

pytestmark = pytest.mark.both
OK = "read, or refused in one sentence; nothing written or run"


def searched(many, short, long):
    "hypothesis' settings for so many examples."
    return settings(
        max_examples=many(short, long),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def damage(draw, whole):
    "Some bytes with one to four accidents: bits flipped, a tail lost, bytes inserted, a piece doubled or gone, a number made large."
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at, n = draw(st.integers(0, len(data) - 1)), draw(st.integers(1, 40))
        kind = draw(st.sampled_from(("flip", "flip", "cut", "insert", "double", "drop", "large")))
        if kind == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=9))
        elif kind == "double":
            data[at:at] = data[at : at + n]
        elif kind == "drop":
            del data[at : at + n]
        else:
            data[at : at + 4] = draw(st.sampled_from((b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\x80")))
    return bytes(data)


@pytest.fixture
def place(tmp_path):
    "A folder in which nothing may appear; the working directory for the test."
    (tmp_path / "empty").mkdir()
    before = os.getcwd()
    os.chdir(tmp_path / "empty")
    yield tmp_path
    os.chdir(before)
    assert not list((tmp_path / "empty").iterdir())


def read_or_refuse(tally, what, read, same=None):
    "Call a reader: it answers (and then rightly, where that can be known) or raises one AimError of one line."
    try:
        out = read()
    except AimError as e:
        bad = "\n" in str(e)
    else:
        bad = same is not None and not same(out)
    tally.add(what, OK, bad)
    assert not bad


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---- checkpoints


def test_checkpoints(place, tally, many):
    tensors, meta = (
        dict(W=torch.randn(5, 4, generator=torch_rng(1)), n=torch.arange(3), b=torch.tensor([True, False])),
        dict(step=3, identity=dict(a=1), note="n"),
    )
    whole = save_tensors(place / "f", tensors, meta).read_bytes()

    @searched(many, 60, 1500)
    @given(damage(whole))
    def check(data):
        (place / "f").write_bytes(data)
        read_or_refuse(
            tally,
            "checkpoint with random damage",
            lambda: load_tensors(place / "f"),
            lambda out: equal(out[0], tensors) and out[1] == meta,
        )

    check()


def test_checkpoints_of_any_bytes(place, tally, many):
    head = st.builds(
        lambda n, text, rest: struct.pack("<Q", n) + text + rest,
        st.integers(0, 2**63),
        st.sampled_from(
            (
                b"{}",
                b'{"W":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}',
                b'{"__metadata__":{"aim_nb":"{}"}}',
                b"\x80\x04.",
            )
        ),
        st.binary(max_size=20),
    )

    @searched(many, 60, 1000)
    @given(st.binary(max_size=300) | head)
    def check(data):
        (place / "f").write_bytes(data)
        read_or_refuse(tally, "checkpoint of arbitrary bytes", lambda: load_tensors(place / "f"), lambda out: False)

    check()


class Evil:
    "A pickle that makes a folder when it is read."

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_a_checkpoint_that_is_a_program(place, tally):
    "As torch.save would have written it, as a bare pickle, and under a checkpoint's name in a run's folder: refused, nothing ran."
    mark = place / "empty" / "ran"
    kinds = [pickle.dumps(Evil(mark), p) for p in range(6)]
    f = io.BytesIO()
    torch.save({"W": Evil(mark)}, f)
    kinds.append(f.getvalue())
    for data in kinds:
        (place / "step-000000001.safetensors").write_bytes(data)
        read_or_refuse(
            tally, "malicious checkpoint", lambda: load_tensors(place / "step-000000001.safetensors"), lambda out: False
        )
        with pytest.raises(AimError, match="no checkpoint"):
            Checkpoints(place, {}).latest()
        assert not mark.exists()
    pickle.loads(kinds[0])
    assert mark.is_dir()
    mark.rmdir()  # the trap itself works


# ---- banks


@pytest.mark.parametrize("name", ["bank.json", "labels.npy", "split.npy", "images.npy"])
def test_bank_files(name, place, tally, many):
    home = tiny_bank(place) / "glyphs"
    whole = (home / name).read_bytes()

    @searched(many, 25, 300)
    @given(damage(whole[:2000]))
    def check(data):
        (home / name).write_bytes(data + (whole[2000:] if name == "images.npy" else b""))
        read_or_refuse(
            tally,
            f"bank with a damaged {name}",
            lambda: load_bank(home),
            lambda b: b.labels.shape == b.split.shape == b.images.shape[:1],
        )

    check()
    (home / name).write_bytes(whole)
    load_bank(home)


def test_pickles(place, tally, many):
    d = {
        "data": np.arange(40, dtype=np.uint8).reshape(10, 4),
        "labels": list(range(10)),
        "names": ["a", b"b"],
        "more": {"x": np.float32(2)},
    }
    for protocol in range(6):

        @searched(many, 15, 300)
        @given(damage(pickle.dumps(d, protocol)))
        def check(data):
            read_or_refuse(
                tally,
                "pickle with random damage",
                lambda: read_pickle(data, "x.pkl"),
                lambda out: isinstance(out, dict),
            )

        check()


def test_pickles_that_are_programs(place, tally, many):
    "Opcodes at random with the names that attackers use."
    calls = st.sampled_from(
        (
            "posix\nsystem",
            "os\nmkdir",
            "builtins\neval",
            "builtins\ngetattr",
            "numpy\nload",
            "subprocess\nPopen",
            "numpy\nndarray",
            "_codecs\nencode",
            "collections\nOrderedDict",
            "numpy.core.multiarray\n_reconstruct",
        )
    )
    op = st.one_of(
        calls.map(lambda c: b"c" + c.encode() + b"\n"),
        st.sampled_from(
            (
                b"(",
                b"t",
                b"R",
                b"b",
                b"}",
                b"]",
                b"s",
                b"0",
                b"\x85",
                b"\x81",
                b"o",
                b"\x93",
                b"N",
                b"X\x04\0\0\0pwnd",
                b"S'pwned'\n",
                b"r\xff\xff\xff\x7f",
                b"\x96\xff\xff\xff\xff\xff\x00\x00\x00",
                b"K\x01",
                b"q\0",
                b"h\0",
            )
        ),
    )

    @searched(many, 60, 1500)
    @given(st.lists(op, max_size=12))
    def check(ops):
        read_or_refuse(
            tally,
            "pickle of random instructions",
            lambda: read_pickle(b"\x80\x02" + b"".join(ops) + b".", "x.pkl"),
            lambda out: isinstance(out, dict),
        )

    check()


def in_little_memory(work, said, limit):
    "Run `work` in a process that may take `limit` bytes more than it has: 0 when it ended well."
    warm()

    def limited():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limit,) * 2)
        work()

    return Child(limited, said)


def refused_in(tally, what, work, said, limit):
    "The work is refused in one sentence within `limit` bytes of memory."
    child = in_little_memory(work, said, limit)
    ok = child.wait() == 2 and "MemoryError" not in child.text
    tally.add(what, "refused in one sentence, in little memory; nothing written", not ok)
    assert ok, child.text


def test_a_pickle_that_asks_for_memory(place, tally):
    for i, data in enumerate(
        (
            b"\x80\x02]r\xff\xff\xff\x7f.",
            b"\x80\x05\x96\xff\xff\xff\xff\x07\0\0\0.",
            b"\x80\x04\x8e\xff\xff\xff\xff\x07\0\0\0.",
            b"I" + b"9" * 5000 + b"\n.",
        )
    ):
        refused_in(
            tally, "pickle that asks for gigabytes", partial(read_pickle, data, "x.pkl"), place / "said", 300 << 20
        )


# ---- archives and pictures


def make_zip(path, members, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as z:
        for name, data in members.items():
            z.writestr(name, data)
    return path


def read_all(path):
    with open_files(path) as files:
        for name, read in files.items():
            with file_errors(f"{path}: {name}"):
                read()


def make_archive(path, members):
    "A zip or a tar.gz of `members`, as the name asks."
    if path.suffix == ".zip":
        return make_zip(path, members)
    with tarfile.open(path, "w:gz") as t:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    return path


FOUR_PICTURES = {f"a/b/{i}.png": png(np.full((9, 9), i, np.uint8)) for i in range(4)}


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_archives(kind, place, tally, many):
    path = make_archive(place / f"x.{kind}", FOUR_PICTURES)

    @searched(many, 30, 500)
    @given(damage(path.read_bytes()))
    def check(data):
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_or_refuse(tally, f"{kind[:3]} archive with random damage", lambda: read_all(path))

    check()


def test_archives_inside_their_gzip(place, tally, many):
    path = make_archive(place / "x.tar.gz", FOUR_PICTURES)

    @searched(many, 30, 500)
    @given(damage(gzip.decompress(path.read_bytes())))
    def check(data):
        path.write_bytes(gzip.compress(data, 1))
        read_or_refuse(tally, "tar archive with damage inside its gzip", lambda: read_all(path))

    check()


def test_names_that_leave_the_archive(place, tally, many):
    part = st.sampled_from(("..", ".", "a", "b.png", "", "C:", "\\", "...", "con", "\u2025", "%2e%2e"))

    @searched(many, 40, 500)
    @given(st.lists(part, min_size=1, max_size=5), st.sampled_from(("/", "\\")))
    def check(parts, slash):
        name = slash.join(parts)
        if not name or name.endswith("/"):
            return  # folders are not read at all
        leaves = ".." in parts or name.startswith(("/", "\\"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_zip(place / "n.zip", {name: b"x"})
        before = sorted(place.rglob("*"))
        read_or_refuse(
            tally, "zip with a name that may lead outside", lambda: read_all(place / "n.zip"), lambda out: not leaves
        )
        assert sorted(place.rglob("*")) == before

    check()


def lying_zip(path, size, says):
    "A zip whose one member unpacks to `size` bytes and says `says`."
    z = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = b"".join(z.compress(bytes(1 << 20)) for _ in range(size >> 20)) + z.flush()

    def head(sig, more):
        return sig + struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, 0, len(packed), says, 5, 0) + more

    local = head(b"PK\3\4", b"") + b"a.png" + packed
    central = head(b"PK\1\2\x14\0", struct.pack("<HHHII", 0, 0, 0, 0, 0)) + b"a.png"
    path.write_bytes(local + central + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0))
    return path


def test_zip_bombs(place, tally, many):
    "One that lies about its size, and methods without a bound; honest ones in `test_banks`."
    for says in (10, 1 << 20):
        lying_zip(place / "lie.zip", many(64, 1024) << 20, says)
        refused_in(
            tally,
            "zip bomb that says it is small",
            lambda: read_all(place / "lie.zip"),
            place / "said",
            48 << 20 if many(1, 0) else 300 << 20,
        )
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        make_zip(place / "other.zip", {"a.png": bytes(64 << 20)}, method)
        refused_in(tally, "zip bomb of a rare method", lambda: read_all(place / "other.zip"), place / "said", 48 << 20)


@pytest.mark.stress
def test_great_bombs(place, tally):
    "An honest zip of one great member, one of very many, a tar of 20 GB, tars whose headers are 2 GB."
    with zipfile.ZipFile(place / "great.zip", "w", zipfile.ZIP_DEFLATED) as z:
        block = bytes(1 << 24)
        with z.open("a.png", "w", force_zip64=True) as f:
            [f.write(block) for _ in range(40)]
    refused_in(tally, "zip bomb of one great member", lambda: read_all(place / "great.zip"), place / "said", 300 << 20)
    make_zip(place / "many.zip", {f"{i}.png": b"" for i in range(BIG["members"] + 1)}, zipfile.ZIP_STORED)
    refused_in(tally, "zip bomb of many members", lambda: read_all(place / "many.zip"), place / "said", 1 << 30)
    for kind, size in ((tarfile.REGTYPE, 20 << 30), (tarfile.XHDTYPE, 2 << 30), (tarfile.GNUTYPE_LONGNAME, 2 << 30)):
        info = tarfile.TarInfo("a")
        info.type, info.size = kind, size
        with gzip.open(place / "great.tar.gz", "wb", 1) as f:
            f.write(info.tobuf(tarfile.GNU_FORMAT))
            [f.write(bytes(1 << 24)) for _ in range(20)]
        refused_in(tally, "tar bomb", lambda: read_all(place / "great.tar.gz"), place / "said", 300 << 20)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge_png(w, h):
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "w,h", [(10**4, 10**4), (65_000, 65_000), (2**31 - 1, 2**31 - 1), pytest.param(1, 2**30, marks=pytest.mark.stress)]
)
def test_image_bombs(place, tally, w, h):
    gif = (
        b"GIF89a"
        + struct.pack("<HH", min(w, 65535), min(h, 65535))
        + b"\0\0\0,\0\0\0\0"
        + struct.pack("<HH", min(w, 65535), min(h, 65535))
        + b"\0\x02\x02\x4c\x01\0;"
    )
    bmp = (
        b"BM"
        + struct.pack("<IHHI", 70, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, w if w < 2**31 else 0, h if h < 2**31 else 0, 1, 24, 0, 16, 0, 0, 0, 0)
        + bytes(16)
    )
    ppm = f"P6 {w} {h} 255\n".encode() + bytes(100)
    for data in (huge_png(w, h), bmp, ppm) + ((gif,) if min(w, h) > 9000 else ()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refused_in(tally, "image bomb", partial(decode, data, "x.png", "RGB"), place / "said", 200 << 20)


def test_pictures(place, tally, many):
    pixels = numpy_rng("picture").integers(0, 255, (12, 12, 3), dtype=np.uint8)
    for form in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "PPM"):
        f = io.BytesIO()
        Image.fromarray(pixels).save(f, form)

        @searched(many, 12, 200)
        @given(damage(f.getvalue()))
        def check(data):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read_or_refuse(
                    tally,
                    "picture with random damage",
                    lambda: decode(data, "x", "RGB"),
                    lambda im: im.mode == "RGB" and im.width * im.height <= BIG["pixels"],
                )

        check()


# ---- records


def a_record(**kw):
    return records.new_record(
        "fewshot",
        "glyphs",
        "sib",
        0,
        Budget("tiny", "fewshot", 1, 1),
        Protocol(),
        dict(n_shot=1),
        "0" * 12,
        metrics=dict(accuracy=50.0, ci95=1.0),
        history=[dict(step=1, accuracy=50.0)],
    )


def test_records(place, tally, many):
    "A bad record among good ones is named and left out; the good ones stay."
    good, bad = records.save_record(a_record(), place / "r"), place / "r" / "a-bad-one.json"
    whole = good.read_bytes()

    @searched(many, 60, 1000)
    @given(damage(whole) | st.binary(max_size=50) | st.just(b"[" * 100_000))
    def check(data):
        bad.write_bytes(data)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = records.read_records(place / "r", n_shot=1)
        named = any("a-bad-one.json" in str(w.message) for w in said)
        try:
            same = json.loads(data) == json.loads(whole)  # the seal covers every field
        except (ValueError, RecursionError):
            same = False
        ok = found == [json.loads(whole)] and named != same
        tally.add("record with random damage", "named and left out of every mean", not ok)
        assert ok, data

    check()


# ---- AIM


def test_aim_takes_every_shape(tally, many):
    "Any sizes, any leading dimensions, any switches: the shape and finiteness of the output, K mechanisms a row, the same for a row alone; or one sentence."
    sizes = st.fixed_dictionaries(
        dict(
            d_in=st.integers(1, 7),
            d_out=st.integers(1, 7),
            M=st.integers(1, 6),
            K=st.integers(0, 7),
            l=st.integers(0, 3),
            d_h=st.integers(1, 4),
            d_k=st.integers(1, 4),
            gate=st.sampled_from(("sigmoid", "raw")),
            decision=st.sampled_from(("hard", "soft")),
            select=st.sampled_from(("shared", "sample")),
        )
    )

    @searched(many, 80, 1000)
    @given(sizes, st.lists(st.integers(0, 4), max_size=3), st.booleans(), st.integers(0, 99))
    def check(kw, lead, train, seed):
        try:
            layer = AIM(**kw, generator=torch_rng(seed)).train(train)
        except AimError as e:
            ok = "\n" not in str(e) and not (
                1 <= kw["K"] <= kw["M"]
                and kw["K"] + kw["l"] <= kw["M"]
                and kw["gate"] == "sigmoid"
                and kw["decision"] == "hard"
            )
        else:
            x = torch.randn(*lead, kw["d_in"], generator=torch_rng(seed, "x"))
            y = layer(x, generator=torch_rng(seed, "ranks")) if train else layer(x)
            ok = y.shape == (*lead, kw["d_out"]) and bool(torch.isfinite(y).all())
            if ok and x.numel() and not train:
                alone = layer(x.reshape(-1, kw["d_in"])[-1:]).reshape(-1)
                ok = torch.allclose(alone, y.reshape(-1, kw["d_out"])[-1], atol=1e-5)
        tally.add(
            "AIM of random sizes on inputs of random shapes",
            "right shape, finite, rows independent; or one sentence",
            not ok,
        )
        assert ok, (kw, lead, train)

    check()
