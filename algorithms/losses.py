"""Per-token losses and the weights that turn them into one number.

Every aggregation is a weight per token whose denominators count the whole minibatch, over all ranks: the value of a loss does not
depend on how its sequences were split into micro-batches or over ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.types import TokenBatch

LOG_RATIO_LIMIT = 20.0  # exp(20) is finite in float32; what is clamped is counted
LOW_VAR_KL_LIMIT = 10.0


@dataclass(frozen=True)
class BatchTotals:
    """Counts over all ranks of one minibatch, the denominators of every aggregation."""

    tokens: int
    sequences: int


def token_weight(aggregation: str, length: int, totals: BatchTotals, horizon: int) -> float:
    """The weight of each token of a sequence of `length` response tokens.

    `token-mean` (DAPO), `seq-mean-token-mean` (GRPO), `seq-mean-token-sum-norm` (Dr. GRPO: divides by the constant `horizon`, the
    response budget), `sum` (the loss carries its own weights). Raises ValueError for another name.
    """
    if aggregation == "sum":
        return 1.0
    if aggregation == "token-mean":
        return 1.0 / max(totals.tokens, 1)
    if aggregation == "seq-mean-token-mean":
        return 1.0 / (max(totals.sequences, 1) * max(length, 1))
    if aggregation == "seq-mean-token-sum-norm":
        return 1.0 / (max(totals.sequences, 1) * horizon)
    raise ValueError(f"unknown loss aggregation {aggregation!r}")


def clamped_log_ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Kept within what `exp` can represent, and where it was clamped (as 0/1 floats)."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), (log_ratio.detach().abs() > LOG_RATIO_LIMIT).float()


@dataclass(frozen=True)
class PolicyLoss:
    """A surrogate's per-token terms, all of shape [tokens]."""

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    """PPO's clipped surrogate (AC2 equation 5), with dual clip where the advantage is negative (Ye et al., 2020).

    `loss = -min(rho A, clip(rho, 1 - low, 1 + high) A)`; for A < 0 it is bounded above by `-dual_clip A`. With the ratio of whole
    sequences it is GSPO's (Zheng et al., 2025).
    """
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    was_clipped = (clipped > unclipped).float()
    was_dual_clipped = torch.zeros_like(was_clipped)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        hit = (advantages < 0) & (loss > bound)
        loss, was_dual_clipped = torch.where(hit, bound, loss), hit.float()
    return PolicyLoss(loss, was_clipped, was_dual_clipped)


def cispo_loss(ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """CISPO: `-sg(clip(rho, 1 - low, 1 + high)) A log pi`, so that a clipped token keeps its gradient (MiniMax-M1, 2025)."""
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-weight * advantages * logprobs, (weight != ratio.detach()).float(), torch.zeros_like(weight))


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy: k1, k2 or k3 (Schulman, 2020), or verl's
    `low_var_kl`, which is k3 within [-10, 10] and has no gradient beyond."""
    log_ratio, _ = clamped_log_ratio(ref_logprobs - logprobs)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return log_ratio.exp() - 1 - log_ratio
    if estimator == "low_var_kl":
        return (log_ratio.exp() - 1 - log_ratio).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)
    raise ValueError(f"unknown KL estimator {estimator!r}")


def truncated_importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Token-level truncated importance sampling between trainer and engine: `min(pi_old / pi_rollout, cap)`, and its metrics.

    Corrects for the two computing different probabilities from the same weights; `cap=None` turns it off (weights of 1).
    """
    ratio = clamped_log_ratio(old_logprobs - rollout_logprobs)[0].exp()
    difference = (old_logprobs.exp() - rollout_logprobs.exp()).abs()
    metrics = {
        "training/rollout_probs_diff_mean": difference,
        "training/rollout_probs_diff_max": difference,
        "training/rollout_logprob_diff_mean": (old_logprobs - rollout_logprobs).abs(),
        "training/rollout_logprob_diff_max": (old_logprobs - rollout_logprobs).abs(),
        "rollout_corr/kl": rollout_logprobs - old_logprobs,
        "rollout_corr/rollout_is_mean": ratio,
        "rollout_corr/rollout_is_max": ratio,
    }
    if cap is None:
        return torch.ones_like(ratio), metrics
    metrics["rollout_corr/rollout_is_ratio_fraction_high"] = (ratio > cap).float()
    return ratio.clamp(max=cap), metrics


def policy_gradient_loss(
    tokens: TokenBatch,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    importance_cap: float | None,
    cispo: bool = False,
    by_sequence: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The surrogate x the weight that corrects for the engine's probabilities, per token, and what is worth logging.

    `by_sequence` takes the ratio of whole sequences, the geometric mean of their tokens' (GSPO), in place of each token's.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    log_ratio, clamped = clamped_log_ratio(tokens.sequence_mean(log_ratio) if by_sequence else log_ratio)
    ratio = log_ratio.exp()
    if cispo:
        policy = cispo_loss(ratio, tokens.logprobs, tokens.advantages, clip_low, clip_high)
    else:
        policy = clipped_policy_loss(ratio, tokens.advantages, clip_low, clip_high, dual_clip)
    weight, mismatch = truncated_importance_weights(tokens.old_logprobs, tokens.rollout_logprobs, importance_cap)
    loss = policy.loss * weight
    return loss, mismatch | {
        "actor/pg_loss": loss.detach(),
        "actor/pg_clipfrac": policy.clipped,
        "actor/pg_clipfrac_lower": policy.dual_clipped,
        "actor/ppo_kl": (tokens.old_logprobs - tokens.logprobs).detach(),
        "actor/log_ratio_clamped": clamped,
        "actor/entropy": tokens.entropy.detach(),
    }
