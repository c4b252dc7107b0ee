"Properties of the samplers that must hold for every bank, seed and index, searched by hypothesis."

import functools
import numpy as np
import pytest
import torch
from conftest import TALLY
from hypothesis import given, strategies as st
from aim_nb.core import AimError, torch_rng
from aim_nb.data.tasks import (
    Policy,
    augment,
    draw_episode,
    draw_episodes,
    draw_meta_batch,
    draw_trajectory,
)

seeds = st.integers(0, 2**32)


def for_all(*what):
    "Searched by hypothesis, longer in `make stress`, every try counted in the table."

    def wrap(test):
        @pytest.mark.both
        @given(*what)
        @functools.wraps(test)
        def tried(*args, **kw):
            add = functools.partial(
                TALLY.add,
                "episodes, trajectories and meta-batches of random banks, sizes, seeds and indices",
                "every property holds, or one sentence says what is missing",
            )
            try:
                test(*args, **kw)
            except Exception:
                add(True)
                raise
            add()

        return tried

    return wrap


@st.composite
def banks(draw, classes=st.integers(2, 9), images=st.integers(6, 14)):
    "Classes of different sizes whose rows are scattered over the bank, as lists or as one array."
    n = draw(classes)
    sizes = [draw(images)] * n if draw(st.booleans()) else [draw(images) for _ in range(n)]
    order = np.random.Generator(np.random.PCG64(draw(seeds))).permutation(sum(sizes))
    rows = np.split(order, np.cumsum(sizes)[:-1])
    return np.stack(rows) if len(set(sizes)) == 1 and draw(st.booleans()) else rows


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b))


@for_all(
    banks(images=st.integers(7, 14)), seeds, st.integers(0, 10**9), st.integers(1, 3), st.integers(0, 3), st.data()
)
def test_episode(rows, seed, index, n_shot, n_query, data):
    n_way = data.draw(st.integers(1, len(rows)))
    e = draw_episode(rows, seed, index, n_way, n_shot, n_query)
    assert e.support.shape == (n_way, n_shot) and e.query.shape == (n_way, n_query) and e.classes.shape == (n_way,)
    assert len(set(e.classes)) == n_way
    both = np.concatenate([e.support, e.query], 1)
    assert len(np.unique(both)) == both.size  # no image twice, none in support and query
    for c, r in zip(e.classes, both):
        assert np.isin(r, rows[c]).all()
    assert same(e, draw_episode(rows, seed, index, n_way, n_shot, n_query))
    assert same(
        e, draw_episode(list(rows), np.int64(seed), np.int64(index), n_way, n_shot, n_query)
    )  # lists, arrays, numpy numbers
    more = draw_episode(rows, seed, index, n_way, n_shot + 1, n_query)
    assert np.array_equal(more.query, e.query) and np.array_equal(more.support[:, :n_shot], e.support)


@for_all(banks(), seeds, st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_episodes_in_any_order(rows, seed, indices, random):
    kw = dict(n_way=2, n_shot=2, n_query=3, stream="val")
    batch = draw_episodes(rows, seed, indices, **kw)
    order = list(range(len(indices)))
    random.shuffle(order)
    for i in order:
        assert same([f[i] for f in batch], draw_episode(rows, seed, indices[i], **kw))


@for_all(banks(), seeds, st.integers(0, 10**6), st.data())
def test_trajectory_prefix(rows, seed, index, data):
    train, test = [r[:-2] for r in rows], [r[-2:] for r in rows]
    n = data.draw(st.integers(1, len(rows)))
    k = data.draw(st.integers(1, 4))
    long, short = (
        draw_trajectory(train, test, seed, index, len(rows), 4),
        draw_trajectory(train, test, seed, index, n, k),
    )
    assert (
        np.array_equal(short.classes, long.classes[:n])
        and np.array_equal(short.train, long.train[:n, :k])
        and np.array_equal(short.test, long.test[:n])
    )
    assert sorted(long.classes) == list(range(len(rows)))
    for c, a, b in zip(long.classes, long.train, long.test):
        assert np.isin(a, train[c]).all() and len(set(a)) == 4 and set(b) == set(test[c])
    assert not np.isin(long.train, long.test).any()


@for_all(
    banks(),
    seeds,
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(0, 10),
    st.sampled_from(["same", "redrawn"]),
    st.data(),
)
def test_meta_batch(rows, seed, step, inner, random, images, data):
    k = data.draw(st.integers(1, len(rows)))
    m = draw_meta_batch(rows, seed, step, inner, random, images, n_classes=k)
    assert (
        len(m.inner) == len(m.inner_labels) == k * inner and len(m.outer) == len(m.outer_labels) == random + k * inner
    )
    for r, y in [*zip(m.inner, m.inner_labels), *zip(m.outer, m.outer_labels)]:
        assert r in rows[y]
    assert (
        len(set(m.inner)) == k * inner
        and len(set(m.outer[:random])) == random
        and len(set(m.outer[random:])) == k * inner
    )
    assert list(m.inner_labels) == list(np.repeat(m.classes, inner)) == list(m.outer_labels[random:])
    if images == "same":
        assert np.array_equal(m.outer[random:], m.inner)
    assert same(m, draw_meta_batch(rows, seed, step, inner, random, images, n_classes=k))


@for_all(banks(), seeds)
def test_random_images_of_a_meta_batch_are_a_permutation(rows, seed):
    n = sum(map(len, rows))
    m = draw_meta_batch(rows, seed, 0, 1, n)
    assert sorted(m.outer[:n]) == sorted(np.concatenate(list(rows)))
    assert all(r in rows[c] for r, c in zip(m.outer[:n], m.outer_labels[:n]))


@for_all(banks(), st.integers(1, 30), st.integers(1, 12))
def test_too_few(rows, need, n_classes):
    sizes = [len(r) for r in rows]
    if len(rows) >= n_classes and min(sizes) >= need:
        return draw_episode(rows, 0, 0, n_classes, 1, need - 1)
    with pytest.raises(AimError) as e:
        draw_episode(rows, 0, 0, n_classes, 1, need - 1)
    text = str(e.value)
    if len(rows) < n_classes:
        assert str(n_classes) in text and str(len(rows)) in text
    else:
        assert f"class {int(np.argmin(sizes))} has {min(sizes)} images, but {need} are needed" in text


def test_every_class_and_image_equally_often():
    "A chi-square over 4,000 episodes: support images, query images and label positions are uniform."
    rows, n = np.arange(60).reshape(6, 10), 4000
    e = draw_episodes(rows, 1, range(n), n_way=3, n_shot=2, n_query=3)
    for drawn, cells in ((e.support, 60), (e.query, 60), (e.classes, 6), (e.classes[:, 0], 6)):
        counts = np.bincount(drawn.ravel(), minlength=cells)
        mean = drawn.size / cells
        assert ((counts - mean) ** 2 / mean).sum() < cells + 4 * (2 * cells) ** 0.5
    shifts = np.bincount(
        (e.support[:, 0, 0] % 10) * 10 + e.support[:, 0, 1] % 10, minlength=100
    )  # pairs are independent but for being different
    off = shifts[~np.eye(10, dtype=bool).ravel()]
    assert shifts.reshape(10, 10).trace() == 0 and ((off - n / 90) ** 2 / (n / 90)).sum() < 90 + 4 * 180**0.5


def test_no_global_randomness():
    "Nothing here reads or moves numpy's or torch's own generators."
    rows = np.arange(60).reshape(6, 10)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    draw_episodes(rows, 0, range(3)[:1], n_query=3)
    draw_trajectory(rows[:, :8], rows[:, 8:], 0, 0, 3, 4)
    draw_meta_batch(rows, 0, 0, 5, 5)
    augment(torch.ones(2, 3, 8, 8), torch_rng(0), Policy(2, True, 0.4))
    assert torch.equal(before[0], torch.get_rng_state()) and (before[1] == np.random.get_state()[1]).all()


@for_all(
    seeds,
    st.integers(1, 4),
    st.sampled_from([1, 3]),
    st.integers(6, 12),
    st.integers(6, 12),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.4, 1.5]),
)
def test_augment(seed, n, c, h, w, padding, flip, jitter):
    "Shapes and range are kept, draws repeat, and without colours every pixel is one of the image's or the fill."
    x = torch.rand(n, c, h, w, generator=torch_rng(seed, "x"))
    p = Policy(padding, flip, jitter, fill=0.5)
    y = augment(x, torch_rng(seed), p)
    assert y.shape == x.shape and y.min() >= 0 and y.max() <= 1 and torch.equal(y, augment(x, torch_rng(seed), p))
    if not jitter:
        for a, b in zip(x, y):
            assert torch.isin(b, torch.cat([a.flatten(), torch.tensor([0.5])])).all()
