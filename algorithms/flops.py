"""Decoding FLOPs of policy rollouts (AC2 Appendix B): the compute axis on which algorithms are compared.

Excluded, as there: prefill, validation, value and judge calls, training, elementwise operations, communication.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


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
        The sizes of a model that also sees pictures stand in its `text_config`. Raises ValueError if one is missing, and for layers
        that are no attention over the context, such as those of hybrid models.
        """
        config = {**config, **(config.get("text_config") or {})}
        if other := sorted(set(config.get("layer_types") or []) - {"full_attention", "sliding_attention"}):
            raise ValueError(
                f"cannot count decoding FLOPs: the model has layers of kind {other[0]!r}, for which AC2 has no equation."
            )
        try:
            layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
            vocab = config["vocab_size"]
            kv_heads = config.get("num_key_value_heads") or heads
            head_dim = config.get("head_dim") or hidden // heads
            experts = config.get("num_experts_per_tok") or 0
            width = (config["moe_intermediate_size"] * experts) if experts else config["intermediate_size"]
        except KeyError as missing:
            raise ValueError(f"cannot count decoding FLOPs: the model's config.json has no {missing}.") from None
        attention = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
        router = hidden * (config.get("num_experts") or config.get("num_local_experts") or 0) if experts else 0
        feed_forward = 3 * hidden * width + router
        return cls(a=2 * (layers * (attention + feed_forward) + hidden * vocab), b=4 * layers * heads * head_dim)

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
