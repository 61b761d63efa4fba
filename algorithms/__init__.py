"""What to compute: sampling plans, credit assignment, losses. Torch and numpy only."""

from algorithms.ac2 import AC2
from algorithms.grpo import GRPO
from algorithms.ppo import PPO

ALGORITHMS = {"ac2": AC2, "grpo": GRPO, "ppo": PPO}
