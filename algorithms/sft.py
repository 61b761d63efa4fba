"""Supervised fine-tuning: the negative log-likelihood of demonstrated responses."""

from torch import Tensor

from algorithms.types import TokenBatch


def nll_loss(tokens: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """`-log pi(token)`, per response token."""
    return -tokens.logprobs, {"train/loss": -tokens.logprobs.detach(), "actor/entropy": tokens.entropy.detach()}
