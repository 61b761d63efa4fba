"""The settings that the EasyPPO paper's Tables 1 to 7 list: their title there, and the parameter of a run."""

TASK = {
    "Prompts per rollout batch": "algorithm.problems_per_step",
    "Samples per prompt": "algorithm.group_size",
    "Maximum prompt length": "task.max_prompt_tokens",
    "Maximum response length": "task.max_new_tokens",
    "Rollout temperature": "sampling.temperature",
    "Rollout top-p": "sampling.top_p",
    "Actor learning rate": "optimizer.lr",
    "Critic learning rate": "algorithm.critic.lr",
    "Actor updates per rollout batch": "algorithm.minibatches",
    "Critic epochs per rollout batch": "algorithm.critic.epochs",
    "Actor LR warmup (optimizer steps)": "optimizer.warmup_steps",
    "Critic LR warmup (optimizer steps)": "algorithm.critic.lr_warmup_steps",
    "Critic warmup steps": "algorithm.critic.warmup_steps",
    "Validation responses per problem": "evaluation.n",
    "Validation temperature": "evaluation.temperature",
    "Validation top-p": "evaluation.top_p",
}
OPTIMIZER = {
    "Discount factor": "algorithm.gamma",
    "GAE parameter, policy": "algorithm.gae_lambda_policy",
    "GAE parameter, value": "algorithm.gae_lambda_value",
    "PPO lower clipping parameter": "algorithm.clip_low",
    "PPO upper clipping parameter": "algorithm.clip_high",
    "Dual-clip parameter": "algorithm.dual_clip",
    "Critic value-clipping parameter": "algorithm.critic.value_clip",
    "Actor gradient clipping": "optimizer.clip_grad_norm",
    "Critic gradient clipping": "algorithm.critic.clip_grad_norm",
    "Actor epochs": "algorithm.epochs",
    "Critic epochs": "algorithm.critic.epochs",
    "Actor entropy coefficient": "algorithm.entropy_coef",
    "Actor KL-loss coefficient": "algorithm.kl_coef",
    "KL estimator": "algorithm.kl_estimator",
    "KL in reward": "algorithm.kl_in_reward",
    "Loss aggregation": "algorithm.loss_aggregation",
    "AdamW betas": "optimizer.betas",
    "Weight decay": "optimizer.weight_decay",
    "AdamW numerical epsilon": "optimizer.eps",
}
METHOD = {
    "Noise normalization": "algorithm.critic.noise_normalization",
    "HL-Gauss bins": "algorithm.critic.categorical.bins",
    "Overlong filtering": "algorithm.overlong_filter",
    "K": "algorithm.critic.minibatches",
}
NORMALIZED = {
    "Critic minibatches K": "algorithm.critic.minibatches",
    "Prompts per rollout batch": "algorithm.problems_per_step",
    "Samples per prompt": "algorithm.group_size",
    "Critic learning rate": "algorithm.critic.lr",
    "Overlong filtering": "algorithm.overlong_filter",
    "Return-STD floor": "algorithm.critic.noise_floor",
}
CATEGORICAL = {
    "Number of bins": "algorithm.critic.categorical.bins",
    "Support range": "algorithm.critic.categorical.support",
    "Smoothing bandwidth": "algorithm.critic.categorical.bandwidth",
}
DIAGNOSTICS = {
    "Actor learning rate": "optimizer.lr",
    "Critic learning rate": "algorithm.critic.lr",
    "Critic minibatches per rollout batch": "algorithm.critic.minibatches",
    "Noise normalization": "algorithm.critic.noise_normalization",
    "Overlong filtering": "algorithm.overlong_filter",
    "Kept checkpoints": "checkpoint.keep_steps",
}
ABLATIONS = {
    "K": "algorithm.critic.minibatches",
    "Noise normalization": "algorithm.critic.noise_normalization",
    "Critic learning rate": "algorithm.critic.lr",
}
