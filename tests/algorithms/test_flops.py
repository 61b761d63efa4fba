import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.flops import DecodingCost

QWEN3_4B = {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}

requests = st.lists(st.tuples(st.integers(1, 50_000), st.integers(0, 50_000)), min_size=1, max_size=40)


def test_coefficients_of_the_paper():
    """AC2 Appendix B gives A and B for Qwen3-4B."""
    assert DecodingCost.of_config(QWEN3_4B) == DecodingCost(a=8_044_544_000, b=589_824)


def test_one_request_by_hand():
    """p = 3, g = 5: four forwards attending to 4, 5, 6, 7 positions."""
    assert DecodingCost(a=100, b=10).exact(np.array([3]), np.array([5])) == 4 * 100 + 10 * (4 + 5 + 6 + 7)


def test_first_token_is_free():
    """It comes out of the prefill; so does a request that generated nothing."""
    assert DecodingCost(a=100, b=10).exact(np.array([7, 7]), np.array([1, 0])) == 0


@given(requests)
def test_exact_cost_is_the_sum_over_forwards(pairs):
    cost = DecodingCost(a=11, b=3)
    brute = 0
    for p, g in pairs:
        m = max(g - 1, 0)
        brute += cost.a * m + cost.b * (m * p + m * (m + 1) // 2)
    assert cost.exact(*map(np.array, zip(*pairs, strict=True))) == brute


@given(requests)
def test_means_plus_correction_is_exact(pairs):
    """Equation 8 is what equation 7 leaves out of equation 6."""
    cost = DecodingCost.of_config(QWEN3_4B)
    p, g = map(np.array, zip(*pairs, strict=True))
    m = np.maximum(g - 1, 0)
    estimate = cost.from_means(len(pairs), float(p.mean()), float(m.mean()))
    left_out = len(pairs) * cost.b * (np.cov(m, p, ddof=0)[0, 1] + m.var() / 2) if len(pairs) > 1 else 0.0  # equation 8
    assert estimate + left_out == pytest.approx(cost.exact(p, g), rel=1e-9, abs=1.0)


def test_experts_count_when_active():
    dense = DecodingCost.of_config(QWEN3_4B)
    moe = DecodingCost.of_config(QWEN3_4B | {"num_experts_per_tok": 2, "moe_intermediate_size": 4864, "num_experts": 64})
    assert moe.a - dense.a == 2 * 36 * 2560 * 64  # the same width, plus the router


def test_missing_size_is_named():
    with pytest.raises(ValueError, match="vocab_size"):
        DecodingCost.of_config({k: v for k, v in QWEN3_4B.items() if k != "vocab_size"})


def test_sizes_in_a_text_config_count_and_layers_that_are_no_attention_are_refused():
    nested = {"model_type": "qwen3_5", "text_config": QWEN3_4B | {"layer_types": ["full_attention"] * 36}}
    assert DecodingCost.of_config(nested) == DecodingCost.of_config(QWEN3_4B)
    hybrid = QWEN3_4B | {"layer_types": ["linear_attention", "full_attention"]}
    with pytest.raises(ValueError, match="layers of kind 'linear_attention', for which AC2 has no equation"):
        DecodingCost.of_config({"text_config": hybrid})
