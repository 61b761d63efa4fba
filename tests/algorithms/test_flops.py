from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

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


def hybrid_config(layers: list[str]) -> Any:
    return Qwen3_5TextConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=len(layers),
        layer_types=layers,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=5,
        linear_value_head_dim=7,
    )


@pytest.mark.parametrize("layers", [["full_attention"], ["linear_attention"], ["linear_attention"] * 3 + ["full_attention"]])
def test_a_hybrid_model_counts_its_own_projections_and_states(layers):
    """Against the model itself: two FLOPs for each weight of its matrices, and three products with each state of 4 x 5 x 7."""
    config = hybrid_config(layers)
    matrices = [m for m in Qwen3_5ForCausalLM(config).modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv1d)]
    linear = layers.count("linear_attention")
    weights = sum(m.weight.numel() for m in matrices)
    gate = 0 if linear else 24 * 3 * 8  # a configuration without delta nets says itself whether its attention is gated
    cost = DecodingCost.of_config(config.to_dict())
    assert cost == DecodingCost(a=2 * (weights - gate + 3 * linear * 4 * 5 * 7), b=4 * (len(layers) - linear) * 3 * 8)
    assert gate == 0 or DecodingCost.of_config(config.to_dict() | {"attn_output_gate": True}).a == 2 * weights


def test_layers_that_are_unknown_or_say_too_little_are_refused():
    with pytest.raises(ValueError, match="layers of kind 'mamba', for which there is no equation"):
        DecodingCost.of_config(QWEN3_4B | {"layer_types": ["mamba", "full_attention"]})
    with pytest.raises(ValueError, match=r"config\.json has no 'linear_num_key_heads'"):
        DecodingCost.of_config(QWEN3_4B | {"layer_types": ["linear_attention", "full_attention"]})
