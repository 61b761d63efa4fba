"""A value model on disk: an ordinary model folder with the head beside it; what can be checked of it before a run starts."""

from pathlib import Path

from safetensors import safe_open

from pipelines.data.model_folder import read_model_config

HEAD = "value_head.safetensors"


class ValueModelError(ValueError):
    """A value model that cannot be used here."""


def check_value_model(path: str, outputs: int, policy_path: str) -> None:
    """ValueModelError in one sentence if a folder is no value model for this policy with a head of so many outputs."""
    vocabulary, own = (read_model_config(folder).get("vocab_size") for folder in (policy_path, path))
    if own != vocabulary:
        raise ValueModelError(
            f"algorithm.critic.path={path}: its vocabulary has {own} tokens and the policy's {vocabulary}; the two must share a "
            "tokenizer."
        )
    file = Path(path) / HEAD
    if not file.is_file():
        return
    with safe_open(str(file), framework="np") as head:
        size = head.get_slice("bias").get_shape()[0]
    if size != outputs:
        raise ValueModelError(
            f"algorithm.critic.path={path}: its head has {size} outputs and this run's has {outputs}; set "
            "algorithm.critic.categorical as in the run that made it."
        )
