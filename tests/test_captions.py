"""Captions of runs/words.sh are true, and eight pairs of colour and shape are kept for the end."""

import pytest

from runs.words.captions import WORDS, caption, draw_captioned, one_hot_words, recognise


@pytest.mark.parametrize("unseen", [False, True])
def test_every_caption_is_true_by_the_search_that_grades(unseen):
    images, captions = draw_captioned(24, seed=3, unseen=unseen)
    found = recognise(images)
    assert [caption(*one) for one in zip(*found)] == captions


def test_pairs_to_ask_for_are_never_in_training():
    pairs = []
    for unseen in (False, True):
        _, captions = draw_captioned(4000, seed=0, unseen=unseen)
        pairs.append({tuple(text.split(",")[0].split()[1:]) for text in captions})  # (colour, shape)
    seen, unseen = pairs
    assert len(seen) == 40 and len(unseen) == 8 and not seen & unseen  # 6 colours and 8 shapes


def test_words_are_one_hot_and_in_order():
    captions = ["small red circle, top left", "large cyan dots, centre"]
    vectors = one_hot_words(captions)
    told = [" ".join(WORDS[i] for i in rows[rows.any(1)].argmax(1)) for rows in vectors]
    assert told == [text.replace(",", "") for text in captions]
    assert vectors.sum() == 9 and not vectors[1, 4].any()
