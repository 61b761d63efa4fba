"""AC2's Algorithm 1 in one plain file, with nothing of this project imported: every list a list, every step written out.

It follows the paper's section 3 and Appendix C from planning to what is remembered. Sampling, judging, the critic's answers and the
optimizer steps are asked of a `world`; the real path, asked to use the same random generators, must agree with it step by step.
"""

import math

import numpy as np
import torch

from tests.reference.grpo import logprobs_of


class AC2Reference:
    """State of a run and one method, `step`."""

    def __init__(self, world, problems, *, seed, n_refill, n_batch, g, b, budget, capacity, grid, max_fraction, alpha,
                 pairs_kept, pairs_drawn, window, tau_global, tau_local, min_valid, least, lr, floor, target_entropy,
                 grouped=True):  # fmt: skip
        self.world, self.problems, self.seed = world, problems, seed
        self.n_refill, self.n_batch, self.g, self.b, self.budget = n_refill, n_batch, g, b, budget
        self.capacity, self.grid, self.max_fraction, self.alpha = capacity, grid, max_fraction, alpha
        self.pairs_kept, self.pairs_drawn, self.min_valid, self.least = pairs_kept, pairs_drawn, min_valid, least
        self.window, self.tau_global, self.tau_local = window, tau_global, tau_local
        self.floor, self.target_entropy, self.grouped = floor, target_entropy, grouped
        self.epoch, self.cursor = 0, 0
        self.buffer = []  # (problem, response), oldest first
        self.pairs = []  # (problem, prefix, target), oldest first
        self.bank, self.ready, self.last_error, self.nonzero, self.recent = {}, set(), {}, set(), []
        self.k, self.lr, self.streak = 0.06, lr, 0

    def fresh(self, count):
        """Fresh problems without replacement, epoch after epoch."""
        taken = []
        for _ in range(count):
            if self.cursor == len(self.problems):
                self.epoch, self.cursor = self.epoch + 1, 0
            order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.problems))
            taken.append(self.problems[order[self.cursor]])
            self.cursor += 1
        return taken

    def cut(self, problem, rng):
        """A prefix of one of a problem's trajectories, cut on the grid."""
        stored = [response for p, response in self.buffer if p == problem]
        if not stored:
            return ()
        response = stored[rng.integers(len(stored))]
        cuts = [c for c in range(0, len(response), self.grid) if c <= self.max_fraction * len(response)]
        return response[: cuts[rng.integers(len(cuts))]]

    def step(self, number):
        """Lines 4 to 14; returns what was rolled out and how it was credited, in order."""
        rng = np.random.default_rng([self.seed, number, 0])
        # Line 4: sample.
        refill = self.fresh(self.n_refill)
        batch = []
        if not self.buffer:
            batch = [(problem, ()) for problem in self.fresh(self.n_batch)]
        else:
            distinct = sorted({problem for problem, _ in self.buffer})
            permuted = [str(problem) for problem in rng.permutation(distinct)]
            for i in range(self.n_batch):
                problem = permuted[i % len(permuted)]
                batch.append((problem, self.cut(problem, rng)))
        ready = [i for i, (problem, _) in enumerate(batch) if problem in self.ready]
        count = math.ceil(self.alpha * len(ready))
        audited = {ready[i] for i in rng.permutation(len(ready))[:count]}

        # Lines 5 and 6: refill.
        rolled = []
        new_trajectories = []
        for problem in refill:
            ((response, _, reward),) = self.world.continuations(number, problem, (), 1, self.budget)
            new_trajectories.append((problem, response))
            rolled.append({"problem": problem, "prefix": (), "n": 1, "tokens": self.budget, "purpose": "refill",
                           "advantages": [0.0], "mask": [False], "target": None, "error": None, "rewards": [reward],
                           "responses": [response], "prediction": None, "reference": None})  # fmt: skip

        # Lines 7 to 12: groups; without them a ready problem has one chunk from each of g prefixes.
        states = []
        for i, (problem, prefix) in enumerate(batch):
            if i in ready and not self.grouped:
                cuts = [self.cut(problem, rng) if self.buffer else () for _ in range(self.g)]
                states += [(i, problem, cut, 1) for cut in cuts]
            else:
                states.append((i, problem, prefix, self.g))
        for i, problem, prefix, n in states:
            chunk = i in ready and i not in audited
            reference = self.bank.get(problem)
            left = self.budget - len(prefix)
            tokens = min(self.b, left) if chunk else left
            prediction = self.world.value(number, problem, prefix)
            values, owned, rewards, responses = [], [], [], []
            for response, reason, reward in self.world.continuations(number, problem, prefix, n, tokens):
                by_critic = chunk and reason == "length" and len(prefix) + len(response) < self.budget and 99 not in response
                values.append(self.world.value(number, problem, prefix + response) if by_critic else reward)
                owned.append(by_critic)
                rewards.append(None if by_critic else reward)
                responses.append(response)
            valid = [v for v in values if v is not None]
            substitute = sum(valid) / len(valid) if valid else 0.0
            filled = [v if v is not None else (substitute if o else 0.0) for v, o in zip(values, owned, strict=True)]
            mean = sum(filled) / len(filled)
            target = None
            if len(valid) >= (self.min_valid if n > 1 else 1) and not (n == 1 and prediction is None):
                average = sum(valid) / len(valid)
                # The nearest grid value; of two equally near ones the lower.
                target = min(range(11), key=lambda tenth: (round(abs(tenth / 10 - average), 5), tenth)) / 10
            error = None if target is None else 1.0 if prediction is None else abs(prediction - target)
            if n == 1 and prediction is None:
                error = 1.0  # every invalid prediction is an error of 1, whatever it was to be compared with
            mask = [not (o and v is None) for v, o in zip(values, owned, strict=True)]
            advantages = [v - mean for v in filled]
            if n == 1:  # A = V(s c) - V(s)
                mask = [mask[0] and prediction is not None]
                advantages = [filled[0] - prediction if mask[0] else 0.0]
            rolled.append({"problem": problem, "prefix": prefix, "n": n, "tokens": tokens, "reference": reference,
                           "purpose": "audit" if i in audited else "train", "advantages": advantages,
                           "mask": mask, "target": target,
                           "error": error, "rewards": rewards, "responses": responses, "prediction": prediction})  # fmt: skip
        self.buffer = (self.buffer + new_trajectories)[-self.capacity :]

        # Line 13: readiness, with the bank as it was.
        rng = np.random.default_rng([self.seed, number, 1 << 20])
        targeted = [one for one in rolled if one["target"] is not None]
        entering = targeted
        if len(targeted) > self.pairs_kept:  # a step without groups may have more than the buffer holds
            entering = [targeted[i] for i in sorted(rng.permutation(len(targeted))[: self.pairs_kept])]
        compared = [one for one in rolled if one["error"] is not None]
        errors = {}
        for one in compared:
            errors.setdefault(one["problem"], []).append(one["error"])
        self.nonzero |= {one["problem"] for one in rolled if one["purpose"] != "refill" and one["prediction"]}
        for problem, found in errors.items():
            self.last_error[problem] = sum(found) / len(found)
        self.recent = [*self.recent, [one["error"] for one in compared]][-self.window :]
        everything = [error for step in self.recent for error in step]
        if everything and round(sum(everything) / len(everything), 9) < self.tau_global:
            for problem, error in self.last_error.items():
                if round(error, 9) < self.tau_local and problem in self.bank and problem in self.nonzero:
                    self.ready.add(problem)

        # The critic's pairs and the references.
        self.pairs = (self.pairs + [(one["problem"], one["prefix"], one["target"]) for one in entering])[-self.pairs_kept :]
        candidates = {}
        for one in rolled:
            if one["problem"] not in self.bank:
                good = [r for r, reward in zip(one["responses"], one["rewards"], strict=True) if (reward or 0) >= self.least]
                candidates.setdefault(one["problem"], []).extend(one["prefix"] + r for r in good)
        for problem, solutions in candidates.items():
            if solutions:
                self.bank[problem] = solutions[rng.integers(len(solutions))]

        # Line 14: the entropy's offset, actor, critic, actor, the critic's rate.
        drawn = [self.pairs[i] for i in rng.permutation(len(self.pairs))[: self.pairs_drawn]]
        lessons = []
        for problem, prefix, target in drawn:
            if problem in self.bank:
                lessons += [(problem, prefix, None, target, 0.5), (problem, prefix, self.bank[problem], target, 0.5)]
            else:
                lessons.append((problem, prefix, None, target, 1.0))
        entropy = self.world.entropy(number)
        self.k = min(max(self.k + 0.02 * np.sign(self.target_entropy - entropy), -0.08), 0.08)
        actor, critic = self.world.changes(number)
        used_lr = self.lr
        self.streak = self.streak + 1 if critic > 2 * sum(actor) else 0
        if self.streak == 2:
            self.lr, self.streak = max(self.lr / 2, self.floor), 0
        return rolled, lessons, used_lr


def ac2_update(model, actor, critic, samples, lessons, *, temperature, clip_low, clip_high, dual_clip, actor_norm, critic_norm):
    """Line 14 on real weights: actor, critic, actor, each measured from where it began.

    `samples`: (prompt, response, advantage) in order, None for an advantage that has no loss. `lessons`: (context, answer, weight).
    Returns the norms of the three parameter changes and the critic's loss; the model is updated in place.
    """
    with torch.no_grad():
        old = [logprobs_of(model, prompt, response, temperature)[0] for prompt, response, _ in samples]

    def policy_loss(chosen):
        tokens = sum(len(samples[i][1]) for i in chosen)
        total = torch.zeros(())
        for i in chosen:
            prompt, response, advantage = samples[i]
            ratio = (logprobs_of(model, prompt, response, temperature)[0] - old[i]).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
            if advantage < 0:
                surrogate = torch.maximum(surrogate, torch.tensor(dual_clip * advantage))
            total = total - surrogate.sum()
        return total / tokens

    def value_loss():
        total = torch.zeros(())
        for context, answer, weight in lessons:
            total = total - weight * logprobs_of(model, context, answer, 1.0)[0].sum() / 4
        return total / sum(weight for *_, weight in lessons)

    def apply(optimizer, loss, max_norm):
        before = [p.detach().clone() for p in model.parameters()]
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return float(torch.sqrt(sum(((p.detach() - b) ** 2).sum() for p, b in zip(model.parameters(), before, strict=True))))

    # Both halves have as many continuations and about as many tokens: the longest to the first, two to the second, two back.
    halves = ([], [])
    for place, i in enumerate(sorted(range(len(samples)), key=lambda i: (-len(samples[i][1]), i))):
        halves[(place + 1) // 2 % 2].append(i)
    first = apply(actor, policy_loss([i for i in halves[0] if samples[i][2] is not None]), actor_norm)
    loss = value_loss()
    between = apply(critic, loss, critic_norm)
    second = apply(actor, policy_loss([i for i in halves[1] if samples[i][2] is not None]), actor_norm)
    return first, between, second, float(loss.detach())
