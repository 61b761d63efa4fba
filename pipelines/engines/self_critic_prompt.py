"""From a template file and a tokenizer to the self-critic's prompt: the token ids around a state and of every grid value."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from algorithms.self_critic import MAX_ANSWER_TOKENS, VALUES, SelfCriticPrompt, format_value
from pipelines.data.prompts import apply_template, load_tokenizer, stop_ids

REFERENCE = "{reference}"
FIELDS = ("close_thinking", "plain", "with_reference", "reply")
STATE = "\u2402state\u2403"  # stands for the partial response while the chat template is rendered; in no real text


@dataclass(frozen=True)
class SolutionBlock:
    """Finds the last match of a pattern in the text of token ids; its own ids, or None without a match."""

    pattern: str
    model_path: str

    def __call__(self, ids: np.ndarray) -> np.ndarray | None:
        matches = list(re.finditer(self.pattern, self._tokenizer.decode(ids.tolist())))
        if not matches or not matches[-1].group():
            return None
        return np.asarray(self._tokenizer(matches[-1].group(), add_special_tokens=False)["input_ids"], np.int32)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.model_path)

    def __getstate__(self) -> dict[str, str]:
        return {"pattern": self.pattern, "model_path": self.model_path}


def load_self_critic_prompt(
    path: str, model_path: str, template_arguments: dict[str, Any] | None = None, solution: str | None = None
) -> SelfCriticPrompt:
    """The self-critic's prompt in a model's own turns; ValueError if the file or the tokenizer cannot make one.

    `solution` is the pattern of the part of a response that can serve as a reference.
    """
    template = _read(path)
    tokenizer = load_tokenizer(model_path)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    plain = ids(_after_state(tokenizer, template["plain"], template["reply"], template_arguments))
    asked = _after_state(tokenizer, template["with_reference"], template["reply"], template_arguments)
    before, after = asked.split(REFERENCE)
    ends = stop_ids(model_path, tokenizer)
    end = plain[0] if plain and plain[0] in ends else tokenizer.eos_token_id if tokenizer.eos_token_id is not None else ends[0]
    answers = tuple((*ids(format_value(value)), end) for value in VALUES)
    if (longest := max(map(len, answers))) > MAX_ANSWER_TOKENS:
        raise ValueError(
            f"model.path={model_path}: its tokenizer writes a value such as 0.1 in {longest - 1} tokens, and the critic has "
            f"{MAX_ANSWER_TOKENS - 1}; use another model."
        )
    block = SolutionBlock(solution, model_path) if solution is not None else None
    return SelfCriticPrompt(ids(template["close_thinking"]), plain, ids(before), ids(after), answers, block)


def _read(path: str) -> dict[str, str]:
    if not Path(path).is_file():
        raise ValueError(
            f"model.self_critic_prompt={path}: no such file; builtin:thinking, builtin:instruct and builtin:compact are shipped."
        )
    template = yaml.safe_load(Path(path).read_text())
    for name in FIELDS:
        if not isinstance(template, dict) or not isinstance(template.get(name), str):
            raise ValueError(f"model.self_critic_prompt={path}: no text {name!r}; it needs {', '.join(FIELDS)}.")
    if template["with_reference"].count(REFERENCE) != 1:
        raise ValueError(f"model.self_critic_prompt={path}: with_reference must hold {REFERENCE} once.")
    return template


def _after_state(tokenizer: Any, instruction: str, reply: str, arguments: dict[str, Any] | None) -> str:
    """Everything that follows a partial response: the end of its turn, the instruction as the user's, the reply's beginning."""
    if not tokenizer.chat_template:
        return f"\n{instruction}\n{reply}"
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": STATE},
        {"role": "user", "content": instruction},
    ]
    text = apply_template(tokenizer, messages, arguments=arguments).split(STATE)[1]
    opened = reply.partition("\n")[0]
    if opened and text.rstrip().endswith(opened):  # templates of thinking models begin the section themselves
        text = text.rstrip().removesuffix(opened)
    return text + reply
