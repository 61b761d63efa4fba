"""What engines need to ask the self-critic: the prompt around a state, and which endpoints are its to score."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from algorithms.self_critic import MAX_ANSWER_TOKENS, SelfCriticPrompt
from serve.verifiers.answer_form import after_thinking


@dataclass(frozen=True)
class SelfCritic:
    """Sent to the engines with every block."""

    prompt: SelfCriticPrompt
    context_limit: int
    complete_answer: str | None  # pattern of one in a response's text; an endpoint that holds it is the judge's

    def scores(self, request: dict[str, Any], text: str, reason: str) -> bool:
        """Whether a continuation's end is the self-critic's: cut off at the end of a chunk, without a complete answer.

        An answer stands after the thinking section; a model that thinks and has not ended it has none, whatever it quotes (AC2
        Appendix C, Readiness and auditing).
        """
        return bool(request["chunk"]) and reason == "length" and not self.answered(text)

    def answered(self, text: str) -> bool:
        """Whether the text of a response holds a complete answer, after its thinking."""
        if self.complete_answer is None:
            return False
        thinks = len(self.prompt.close_thinking) > 0  # its template may have opened the section in the prompt
        final = None if thinks and "</think>" not in text else after_thinking(text)
        return final is not None and re.search(self.complete_answer, final) is not None

    def context(self, request: dict[str, Any], response: Sequence[int]) -> tuple[list[int] | None, bool]:
        """The prompt at a state and whether the reference had to be left out; no prompt where even that is too long."""
        state, reference = [*request["prefix_ids"], *response], request["reference_ids"]
        plain = self.prompt.query(request["prompt_ids"], state, None)
        informed = self.prompt.query(request["prompt_ids"], state, reference) if reference is not None else None
        fits = [len(query) + MAX_ANSWER_TOKENS <= self.context_limit for query in (plain, plain if informed is None else informed)]
        if informed is not None and fits[1]:
            return informed.tolist(), False
        return plain.tolist() if fits[0] else None, informed is not None
