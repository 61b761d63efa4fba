"""What to compute: sampling plans, credit assignment, losses. Torch and numpy only."""

from algorithms.grpo import GRPO

ALGORITHMS = {"grpo": GRPO}
