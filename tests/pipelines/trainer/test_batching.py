import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.types import Sample
from pipelines.trainer.batching import microbatches, pad, split_like

shapes = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=30)


def sequences(pairs):
    rng = np.random.default_rng(0)
    return [
        Sample(i, rng.integers(1, 100, size=p + r), p, np.arange(r, dtype=np.float32) + 100 * i, 0.0)
        for i, (p, r) in enumerate(pairs)
    ]


@given(shapes, st.integers(50, 200))
def test_the_cap_is_hard_and_nothing_is_lost(pairs, cap):
    batches = microbatches(sequences(pairs), cap)
    assert all(len(batch) * max(len(s.ids) for s in batch) <= cap for batch in batches)
    assert sorted(s.index for batch in batches for s in batch) == list(range(len(pairs)))


def test_a_sequence_beyond_the_cap_is_an_error():
    with pytest.raises(ValueError, match=r"31 tokens exceeds .*=30"):
        microbatches(sequences([(1, 30)]), 30)


@given(shapes)
def test_selected_positions_predict_exactly_the_responses(pairs):
    batch = sequences(pairs)
    padded = pad(batch, torch.device("cpu"))
    assert padded.targets.tolist() == [int(t) for s in batch for t in s.ids[s.prompt_length :]]
    flat = padded.input_ids.flatten()
    assert flat[padded.select + 1].tolist() == padded.targets.tolist()
    assert (padded.position_ids == torch.arange(padded.input_ids.shape[1])).all()


@given(shapes)
def test_values_come_back_to_their_sequences(pairs):
    batch = sequences(pairs)
    flat = torch.from_numpy(np.concatenate([s.rollout_logprobs for s in batch]))
    for s, values in zip(batch, split_like(flat, batch), strict=True):
        assert values.tolist() == s.rollout_logprobs.tolist()


def test_an_empty_microbatch_becomes_a_dummy():
    padded = pad([], torch.device("cpu"))
    assert padded.input_ids.shape == (1, 2)
    assert len(padded.select) == len(padded.targets) == 0
