"What the glyphs dataset promises: the same bits each time, fixed counts, whole scripts; its notebook checks the choice of classes."

import hashlib
import os
import subprocess
import sys
import numpy as np
import pytest
from aim_nb.data import glyphs
from aim_nb.core import AimError

SIZES = {"train": 600, "val": 64, "test": 600}


@pytest.fixture(scope="module")
def classes():
    return glyphs.glyph_classes()


@pytest.fixture(scope="module")
def data():
    return glyphs.build_glyphs(bar=False)


def digest(x):
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


def some(classes, n=8):
    return [g for split in classes.values() for g in split[:: -(-len(split) // n)]]


def test_counts_and_types(data):
    assert data["images"].shape == (1264 * 20, 28, 28, 1) and data["images"].dtype == np.uint8
    assert data["labels"].dtype == np.int64 and np.bincount(data["labels"]).tolist() == [20] * 1264
    assert data["split"].dtype == np.uint8 and data["split"].reshape(-1, 20).tolist() == [[0] * 15 + [1] * 5] * 1264
    assert len(set(data["class_names"])) == 1264 and "pillow" in data["source"]


def test_splits_are_disjoint_and_scripts_whole(data):
    assert {s: len(v) for s, v in data["splits"].items()} == SIZES
    assert sorted(sum(data["splits"].values(), [])) == list(range(1264))
    scripts = {s: {data["class_names"][i].split("/")[0] for i in v} for s, v in data["splits"].items()}
    assert len(set.union(*scripts.values())) == sum(map(len, scripts.values())) == 21


def test_labels_are_sorted_and_names_tell_the_character(data, classes):
    names = data["class_names"]
    assert names == [g.name for s in SIZES for g in classes[s]]
    assert all(classes[s] == sorted(classes[s], key=lambda g: (g.script, g.code)) for s in SIZES)
    assert "LATIN/U+0061 LATIN SMALL LETTER A" in names


def test_two_builds_are_bit_identical(data, classes):
    firsts = np.cumsum([0, *map(len, classes.values())])
    for start, members in zip(firsts, classes.values()):
        for k in (0, len(members) // 2, len(members) - 1):
            glyphs.boxed.cache_clear()
            built = data["images"][(start + k) * 20 : (start + k + 1) * 20, ..., 0]
            assert digest(glyphs.draw_class(members[k])) == digest(built)


def test_another_process_draws_the_same_bits(classes):
    code = (
        "import hashlib, numpy as np; from aim_nb.data.glyphs import Glyph, draw_class\n"
        "x = np.stack([draw_class(Glyph(c, 'LATIN', (0, 1, 2, 3, 4)), 3) for c in (97, 66, 120)])\n"
        "print(hashlib.sha256(x.tobytes()).hexdigest())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    there = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert there == digest(
        np.stack([glyphs.draw_class(glyphs.Glyph(c, "LATIN", (0, 1, 2, 3, 4)), 3) for c in (97, 66, 120)])
    )


@pytest.mark.parametrize(
    "twins",
    [
        "A\u0391\u0410",
        "oO\u03bf\u043e",
        "e\u00e9\u00e8",
        "\u28ff\u28df",
        "p\u0440",
        "cC\u0441\u0421\u03f2",
        "\U0001f06c\U0001f065",
    ],
)
def test_known_look_alikes_are_at_most_one_class(classes, twins):
    everyone = {g.code for s in SIZES for g in classes[s]}
    kept = [c for c in twins if ord(c) in everyone]
    assert len(kept) <= 1 and (kept == ["A"] or twins[0] != "A")


def test_no_image_is_empty_full_or_twice_in_its_class(data):
    ink = (data["images"] < 128).sum((1, 2, 3))
    assert ink.min() > 3 and ink.max() < 0.8 * 28 * 28
    for images in data["images"].reshape(1264, 20, -1):
        assert len({x.tobytes() for x in images}) == 20


def test_paper_is_white_and_ink_is_dark(data):
    assert (data["images"] == 255).mean() > 0.7 and (data["images"].min((1, 2, 3)) < 30).mean() > 0.99


def test_another_seed_gives_other_images_of_the_same_classes(classes):
    for g in some(classes, 3):
        a, b = glyphs.draw_class(g, 0), glyphs.draw_class(g, 1)
        assert a.shape == b.shape and not any(np.array_equal(x, y) for x, y in zip(a, b))


def test_a_writer_keeps_a_hand_through_a_script():
    a, b = glyphs.writer_habits("LATIN", 0), glyphs.writer_habits("LATIN", 0)
    assert all(np.array_equal(a[k], b[k]) for k in a) and not np.array_equal(
        a["slant"], glyphs.writer_habits("GREEK", 0)["slant"]
    )


def test_every_class_has_four_faces_or_more(classes):
    assert all(len(set(g.faces)) >= 4 and set(g.faces) <= set(range(12)) for s in SIZES for g in classes[s])


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AimError, match=r"pip install 'aim_nb\[notebooks\]'"):
        glyphs.face_paths()


def test_without_matplotlib_building_says_so():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'matplotlib.ft2font']))\nfrom aim_nb import core\nfrom aim_nb.data import glyphs\n"
        "try: glyphs.build_glyphs(bar=False)\nexcept core.AimError as e: print(e)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'aim_nb[notebooks]'" in said and len(said.splitlines()) == 1
