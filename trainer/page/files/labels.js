// Names of series in words, with units, and the panel each belongs to.

const LABELS = {
  "train/reward": ["Training reward", ""],
  "val/reward": ["Validation reward", ""],
  "train/reward_std_dev": ["Spread within groups", ""],
  "loss/train": ["Loss", ""],
  "loss/entropy": ["Entropy", "nats per token"],
  "loss/clip_frac": ["Clipped tokens", "share"],
  "loss/grad_norm": ["Gradient norm", ""],
  "loss/kl_div": ["KL of a step", "nats per token"],
  "loss/kl_policy_ref": ["KL to the base model", "nats per token"],
  "loss/sampler_kl": ["KL, sampler to learner", "nats per token"],
  "loss/sampler_gap": ["Engine against learner", "nats per token"],
  "loss/effective_sample_size": ["Effective sample size", "share"],
  "loss/ratio": ["Policy ratio", ""],
  "loss/learning_rate": ["Learning rate", ""],
  "canary/logprob_difference": ["Canary: engine against learner", "nats per token"],
  "data/step_num_truncated": ["Answers cut off by max_tokens", "per step"],
  "data/step_num_groups_submitted": ["Groups sent", "per step"],
  "data/step_num_groups_trainable": ["Groups that teach", "per step"],
  "data/step_num_trajectories": ["Trajectories", "per step"],
  "data/dropped_equal_rewards": ["Groups with equal rewards", "per step"],
  "data/dropped_empty_group": ["Groups without an attempt", "per step"],
  "data/dropped_too_long": ["Trajectories that are too long", "per step"],
  "data/dropped_stale": ["Trajectories that are too old", "per step"],
  "data/retokenized": ["Choices not sampled here", "per step"],
  "data/step_packed_tokens": ["Tokens after sharing prefixes", "per step"],
  "data/step_trainer_tokens": ["Tokens trained on", "per step"],
  "data/step_unshared_tokens": ["Tokens before sharing prefixes", "per step"],
  "data/constrained_share": ["Constrained tokens", "share"],
  "data/ambiguous_choices": ["Ambiguous choices", "per step"],
  "data/exact_prompts": ["Prompts with exact tokens", "per step"],
  "data/rendered_prompts": ["Prompts rendered again", "per step"],
  "train/exception_rate": ["Lost runs, training", "share"],
  "val/exception_rate": ["Lost runs, validation", "share"],
  "time/sample_s": ["Sampling", "s"],
  "time/prepare_s": ["Preparing", "s"],
  "time/gradient_s": ["Gradients", "s"],
  "time/save_s": ["Saving", "s"],
  "time/load_s": ["Loading", "s"],
  "time/idle_s": ["Idle", "s"],
  "time/overlap_s": ["Sampling during the step", "s"],
  "time/step_s": ["Training step", "s"],
  "gpu/use": ["GPUs computing", "share"],
  "gpu/memory_gib": ["Memory of the fullest GPU", "GiB"],
  "policy_age/mean": ["Policy age, mean", "steps"],
  "policy_age/max": ["Policy age, oldest", "steps"],
};

/** `{label, unit}` of a series; an unknown one is named by its own words. */
export function label(name) {
  if (LABELS[name]) return { label: LABELS[name][0], unit: LABELS[name][1] };
  const [space, ...rest] = name.split("/");
  if (name.startsWith("data/lost_")) return { label: `Lost runs: ${name.slice(10).replaceAll("_", " ")}`, unit: "per step" };
  const words = (rest.join("/") || space).replace(/^step_num_/, "").replaceAll("_", " ");
  const unit = name.startsWith("time/") && name.endsWith("_s") ? "s"
    : name.endsWith("_bytes") ? "bytes" : "";
  const text = unit === "s" ? words.replace(/ s$/, "") : words;
  const prefix = space === "policy_age" ? "Policy age: " : space === "gpu" ? "GPU: " : "";
  return { label: prefix + text.charAt(0).toUpperCase() + text.slice(1), unit };
}

const REWARD = new Set(["reward", "reward_std_dev", "exception_rate"]);
const BOOKKEEPING = new Set(["step", "recorded_at", "num_gradient_steps", "steps_planned", "canary/bound"]);

/** Evaluators: everything that training or validation logs besides the reward itself. */
export function evaluators(columns) {
  const names = new Set();
  for (const name of columns) {
    const [split, ...rest] = name.split("/");
    const part = rest.join("/");
    if ((split === "train" || split === "val") && part && !REWARD.has(part)) names.add(part);
  }
  return [...names].sort();
}

/** Series of `columns` that no plot of the page in `shown` has. */
export function others(columns, shown) {
  const known = new Set(shown);
  return columns.filter((name) => !known.has(name) && !BOOKKEEPING.has(name) && !name.includes(":")).sort();
}
