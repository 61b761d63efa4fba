"""PPO and EasyPPO in one plain file: a whole update from judged rollouts to new weights, with nothing of this project imported.

It reads top to bottom and takes one response at a time, with no padding, no micro-batches and no ranks. The real path must agree
with it number for number.
"""

import torch

from tests.reference.grpo import logprobs_of


def outputs_of(backbone, head, prompt, response):
    """What the head says of the state before each response token, [response, outputs]."""
    hidden = backbone(input_ids=torch.tensor([prompt + response])).last_hidden_state[0]
    return head(hidden[len(prompt) - 1 : -1])


def brute_force_gae(rewards, values, gamma, lam):
    """`A_t = sum_k (gamma lam)^k delta_{t+k}`, summed term by term."""
    T = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < T else 0.0) - values[t] for t in range(T)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(T - t)) for t in range(T)]


def gaussian_bins(target, centres, bandwidth):
    """A Gaussian around the target, integrated over bins around the centres and normalised on them."""
    half = (centres[1] - centres[0]) / 2
    upper, lower = ((centres + half - target) / bandwidth, (centres - half - target) / bandwidth)
    mass = torch.special.ndtr(upper.double()) - torch.special.ndtr(lower.double())
    return (mass / mass.sum()).float()


def ppo_update(
    policy,
    reference,
    backbone,
    head,
    actor_optimizer,
    critic_optimizer,
    groups,
    *,
    temperature,
    gamma,
    lambda_policy,  # a function of the response's length
    lambda_value,
    overlong_filter,
    noise_floor,  # None: no noise normalisation
    critic_minibatches,
    critic_epochs=1,
    critic_lr_warmup=0,
    value_clip,
    bins,  # None: scalar head, else (centres, bandwidth)
    clip_low,
    clip_high,
    dual_clip,
    tis_cap,
    kl_coef,
    kl_in_reward,
    positive_nll,
    max_grad_norm,
    actor_minibatches=1,
    actor_epochs=1,
):
    """One step. `groups`: dicts with `prompt`, `responses`, `rollout_logprobs`, `rewards` (None: not judged), `truncated`.

    Returns what a run would log; weights are updated in place.
    """

    def value_of(outputs):
        return outputs[:, 0] if bins is None else outputs.softmax(-1) @ bins[0]

    # Who takes part in what
    samples = []
    for g, group in enumerate(groups):
        judged = torch.tensor([r for r in group["rewards"] if r is not None])
        spread = float(judged.double().std(correction=0)) if len(judged) > 1 else None
        rows = zip(group["responses"], group["rollout_logprobs"], group["rewards"], group["truncated"], strict=True)
        for response, rollout, reward, truncated in rows:
            completed = reward is not None and not truncated
            samples.append(
                {
                    "group": g,
                    "prompt": group["prompt"],
                    "response": response,
                    "rollout": torch.tensor(rollout),
                    "reward": reward,
                    "spread": spread,
                    "actor": reward is not None if overlong_filter == "none" else completed,
                    "critic": completed if overlong_filter == "both" else reward is not None,
                }
            )
    seen = [s for s in samples if s["critic"]]

    # Values, advantages, targets
    for s in seen:
        with torch.no_grad():
            s["old_values"] = value_of(outputs_of(backbone, head, s["prompt"], s["response"]))
            s["old"] = logprobs_of(policy, s["prompt"], s["response"], temperature)[0]
            s["ref"] = logprobs_of(reference, s["prompt"], s["response"], temperature)[0]
        rewards = (-kl_in_reward * (s["old"] - s["ref"])).tolist()
        rewards[-1] += s["reward"]
        values, length = s["old_values"].tolist(), len(rewards)
        s["advantage"] = torch.tensor(brute_force_gae(rewards, values, gamma, lambda_policy(length)))
        s["returns"] = torch.tensor(brute_force_gae(rewards, values, gamma, lambda_value)) + s["old_values"]
    returns, old_values = torch.cat([s["returns"] for s in seen]), torch.cat([s["old_values"] for s in seen])
    explained = 1 - float((returns - old_values).var(correction=0) / returns.var(correction=0))
    every = torch.cat([s["advantage"] for s in seen])
    for s in seen:
        s["advantage"] = (s["advantage"] - every.mean()) / torch.sqrt(every.var() + 1e-8)

    # Equation 7's weights
    spreads = {s["group"]: s["spread"] for s in seen}
    inverse = {g: 1 / max(spread, noise_floor) for g, spread in spreads.items() if spread is not None} if noise_floor else {}
    weights = {g: inverse[g] * len(inverse) / sum(inverse.values()) if g in inverse else 1.0 for g in spreads}

    # K critic minibatches
    losses, norms, critic_clipped = [], [], []
    size, full_rate = len(samples) // critic_minibatches, critic_optimizer.param_groups[0]["lr"]
    for update in range(critic_epochs * critic_minibatches):
        k = update % critic_minibatches
        part = [s for s in samples[k * size : (k + 1) * size] if s["critic"]]
        total, clipped = torch.zeros(()), 0
        for s in part:
            outputs = outputs_of(backbone, head, s["prompt"], s["response"])
            if bins is None:
                v, old, target = outputs[:, 0], s["old_values"], s["returns"]
                near = old + (v - old).clamp(-value_clip, value_clip)
                clipped += int(((near - target) ** 2 > (v - target) ** 2).sum())
                per_token = 0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2)
            else:
                targets = torch.stack([gaussian_bins(r, *bins) for r in s["returns"]])
                per_token = -(targets * outputs.log_softmax(-1)).sum(-1)
            total = total + weights[s["group"]] * per_token.sum()
        loss = total / sum(len(s["response"]) for s in part)
        critic_optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_([*backbone.parameters(), *head.parameters()], max_grad_norm)))
        critic_optimizer.param_groups[0]["lr"] = full_rate * min(1.0, (update + 1) / max(critic_lr_warmup, 1))
        critic_optimizer.step()
        critic_clipped.append(clipped / sum(len(s["response"]) for s in part))
        losses.append(loss.item())

    # The actor
    actor_norms, bounded, dual_bounded = [], [], []
    size = len(samples) // actor_minibatches
    for update in range(actor_epochs * actor_minibatches):
        k = update % actor_minibatches
        part = [s for s in samples[k * size : (k + 1) * size] if s["actor"]]
        tokens = sum(len(s["response"]) for s in part)
        positive = sum(len(s["response"]) for s in part if s["reward"] > 0)
        total, clipped, dual_clipped = torch.zeros(()), 0, 0
        for s in part:
            new, _ = logprobs_of(policy, s["prompt"], s["response"], temperature)
            ratio, a = (new - s["old"]).exp(), s["advantage"].float()
            surrogate = torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)
            clipped += int((surrogate < ratio * a).sum())
            dual_clipped += int(((a < 0) & (surrogate < dual_clip * a)).sum())
            surrogate = torch.where(a < 0, torch.maximum(surrogate, dual_clip * a), surrogate)
            tis = (s["old"] - s["rollout"]).exp().clamp(max=tis_cap)
            kl = ((s["ref"] - new).exp() - 1 - (s["ref"] - new)).clamp(-10, 10)
            total = total + (-surrogate * tis + kl_coef * kl).sum() / tokens
            if positive_nll and s["reward"] > 0:
                total = total - positive_nll * new.sum() / positive
        actor_optimizer.zero_grad()
        total.backward()
        actor_norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)))
        actor_optimizer.step()
        bounded.append(clipped / tokens)
        dual_bounded.append(dual_clipped / tokens)
    return {
        "critic/vf_loss": sum(losses) / len(losses),
        "critic/grad_norm": sum(norms) / len(norms),
        "critic/vf_clipfrac": sum(critic_clipped) / len(critic_clipped),
        "critic/vf_explained_var": explained,
        "critic/noise_weight/max": max(weights.values()),
        "critic/values/mean": float(old_values.mean()),
        "critic/returns/mean": float(returns.mean()),
        "actor/grad_norm": sum(actor_norms) / len(actor_norms),
        "actor/pg_clipfrac": sum(bounded) / len(bounded),
        "actor/pg_clipfrac_lower": sum(dual_bounded) / len(dual_bounded),
    }
