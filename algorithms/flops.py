"""Decoding FLOPs of policy rollouts (AC2 Appendix B): the compute axis on which algorithms are compared.

Excluded, as there: prefill, validation, value and judge calls, training, elementwise operations, communication.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

LINEAR = "linear_attention"


@dataclass(frozen=True)
class DecodingCost:
    """Coefficients of equation 6: `a` FLOPs per decoding forward, `b` FLOPs per context position per decoding forward."""

    a: int
    b: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "DecodingCost":
        """Derive both from a Hugging Face configuration (as a mapping) of a decoder with gated feed-forward layers.

        Attention projections, feed-forward and vocabulary logits make `a`, the two attention products make `b`; a multiply and an
        addition count as two. Of a mixture of experts the active ones count, and layers with a sliding window as if they saw all.
        A gated delta net (the `linear_attention` of Qwen3-Next and Qwen3.5) carries a state of fixed size instead of a context: its
        projections, its convolution and three products with the state count into `a`. Raises ValueError if a size is missing, and
        for layers of other kinds.
        """
        kinds = list(config.get("layer_types") or [])
        if other := sorted(set(kinds) - {"full_attention", "sliding_attention", LINEAR}):
            raise ValueError(
                f"cannot count decoding FLOPs: the model has layers of kind {other[0]!r}, for which there is no equation."
            )
        try:
            layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
            vocab = config["vocab_size"]
            kv_heads = config.get("num_key_value_heads") or heads
            head_dim = config.get("head_dim") or hidden // heads
            experts = config.get("num_experts_per_tok") or 0
            width = (config["moe_intermediate_size"] * experts) if experts else config["intermediate_size"]
            linear = _gated_delta_net(config) if LINEAR in kinds else 0
        except KeyError as missing:
            raise ValueError(f"cannot count decoding FLOPs: the model's config.json has no {missing}.") from None
        # In models with gated delta nets attention is gated too, by as many numbers as it has queries.
        queries = heads * (2 if config.get("attn_output_gate", bool(linear)) else 1)
        attention = hidden * head_dim * (queries + 2 * kv_heads) + heads * head_dim * hidden
        router = hidden * (config.get("num_experts") or config.get("num_local_experts") or 0) if experts else 0
        feed_forward = 3 * hidden * width + router
        attending = layers - kinds.count(LINEAR)
        mixers = attending * attention + kinds.count(LINEAR) * linear
        return cls(a=2 * (mixers + layers * feed_forward + hidden * vocab), b=4 * attending * heads * head_dim)

    def exact(self, prompts: np.ndarray, generated: np.ndarray) -> int:
        """Equation 6 summed over requests: prompt-plus-prefix lengths and new tokens, both of shape [requests]."""
        m = np.maximum(np.asarray(generated, dtype=object) - 1, 0)  # Python integers: no overflow at paper scale
        p = np.asarray(prompts, dtype=object)
        return int(np.sum(self.a * m + self.b * (m * p + m * (m + 1) // 2)))

    def from_means(self, requests: int, mean_prompt: float, mean_forwards: float) -> float:
        """Equation 7: the estimate from mean prompt-plus-prefix length and mean decoding forwards.

        It leaves `N B (Cov(m, p) + Var(m) / 2)` out, with moments over N (equation 8).
        """
        m, p = mean_forwards, mean_prompt
        return float(requests * (self.a * m + self.b * (m * p + (m * m + m) / 2)))


def _gated_delta_net(config: Mapping[str, Any]) -> int:
    """Multiplications of one layer for one token: projections, convolution, and the state read, corrected and read again."""
    key_width = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value_width = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    mixed = 2 * key_width + value_width  # queries, keys and values
    projections = config["hidden_size"] * (mixed + 2 * value_width + 2 * config["linear_num_value_heads"])
    state = value_width * config["linear_key_head_dim"]
    return int(projections + mixed * config["linear_conv_kernel_dim"] + 3 * state)
