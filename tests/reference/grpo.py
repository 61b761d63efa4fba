"""GRPO in one plain file: a whole update from judged groups to new weights, with nothing of this project imported.

It reads top to bottom and takes one sequence at a time, with no padding, no micro-batches and no ranks: slow, and easy to check
against the paper. The real path must agree with it number for number.
"""

import torch


def logprobs_of(model, prompt, response, temperature):
    """Log-probabilities of the response tokens after the prompt, and the entropies, [response]."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / temperature
    log_softmax = logits.log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax[torch.arange(len(response)), torch.tensor(response)], entropy


def grpo_update(model, optimizer, groups, *, minibatches, temperature, clip_low, clip_high, dual_clip, tis_cap, max_grad_norm):
    """One step. `groups`: dicts with `prompt`, `responses`, `rollout_logprobs`, `rewards` (None: not judged).

    Returns the loss and gradient norm of each minibatch; the model's weights are updated in place.
    """
    samples = []
    for group in groups:
        judged = [r for r in group["rewards"] if r is not None]
        mean = sum(judged) / len(judged)
        for response, rollout, reward in zip(group["responses"], group["rollout_logprobs"], group["rewards"], strict=True):
            samples.append((group["prompt"], response, torch.tensor(rollout), None if reward is None else reward - mean))

    with torch.no_grad():
        old = [logprobs_of(model, prompt, response, temperature)[0] for prompt, response, _, _ in samples]

    losses, norms = [], []
    size = len(samples) // minibatches
    for k in range(minibatches):
        chosen = [i for i in range(k * size, (k + 1) * size) if samples[i][3] is not None]
        tokens = sum(len(samples[i][1]) for i in chosen)
        total = torch.zeros(())
        for i in chosen:
            prompt, response, rollout, advantage = samples[i]
            new, _ = logprobs_of(model, prompt, response, temperature)
            ratio = (new - old[i]).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
            if advantage < 0:
                surrogate = torch.maximum(surrogate, torch.tensor(dual_clip * advantage))
            tis = (old[i] - rollout).exp().clamp(max=tis_cap)
            total = total - (surrogate * tis).sum()
        loss = total / tokens
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms
