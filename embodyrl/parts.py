"""Components that are selected by name: the import path of each name, and the pip extras of optional packages.

To add a component, add one line here. Other packages add components with entry points of the same groups. Every key
that accepts a name also accepts `package.module:attribute`. All other modules of embodyrl are imported directly.
"""

ENVIRONMENTS = {
    "functional": "embodyrl.envs.functional.factory:FACTORY",
    "gym": "embodyrl.envs.gym.factory:FACTORY",
    "libero": "embodyrl.envs.libero.factory:FACTORY",
    "maniskill": "embodyrl.envs.maniskill.factory:FACTORY",
    "metaworld": "embodyrl.envs.metaworld.factory:FACTORY",
    "openenv": "embodyrl.envs.openenv.factory:FACTORY",
    "robots": "embodyrl.envs.robots.factory:FACTORY",
    "tabletop": "embodyrl.envs.tabletop.factory:FACTORY",
    "text": "embodyrl.envs.text.factory:FACTORY",
    "text_game": "embodyrl.envs.text.game:FACTORY",
}
"""Environment factories (`env.env_type`); entry-point group `embodyrl.envs`."""

POLICIES = {
    "act": "embodyrl.policies.lerobot.act:FACTORY",
    "causal_lm": "embodyrl.policies.causal_lm:CAUSAL_LM",
    "causal_lm_tiny": "embodyrl.policies.causal_lm:TINY",
    "cnn": "embodyrl.policies.actor_critic:CNN",
    "diffusion": "embodyrl.policies.lerobot.diffusion:FACTORY",
    "flow_small": "embodyrl.policies.flow.small:FACTORY",
    "lerobot": "embodyrl.policies.lerobot.process:FACTORY",
    "mlp": "embodyrl.policies.actor_critic:MLP",
    "openvla": "embodyrl.policies.openvla_oft:OPENVLA",
    "openvla_oft": "embodyrl.policies.openvla_oft:FACTORY",
    "pi0": "embodyrl.policies.flow.vla:FACTORY",
    "pi05": "embodyrl.policies.flow.vla:PI05",
    "random": "embodyrl.policies.untrained.policy:RANDOM",
    "remote": "embodyrl.policies.remote:FACTORY",
    "scripted": "embodyrl.policies.untrained.policy:SCRIPTED",
    "smolvla": "embodyrl.policies.flow.vla:FACTORY",
    "vision_lm": "embodyrl.policies.causal_lm:VISION_LM",
    "vision_lm_tiny": "embodyrl.policies.causal_lm:VISION_TINY",
}
"""Policy factories (`model.model_type`); entry-point group `embodyrl.policies`."""

ADVANTAGES = {
    "filtered_bc": "embodyrl.algorithms.off_policy.filtered_bc:FILTERED_BC",
    "gae": "embodyrl.algorithms.estimators:GAE",
    "gdpo": "embodyrl.algorithms.objectives.outcomes:GDPO",
    "gigpo": "embodyrl.algorithms.objectives.estimators:GIGPO",
    "gpg": "embodyrl.algorithms.objectives.outcomes:GPG",
    "grpo": "embodyrl.algorithms.estimators:GRPO",
    "iql": "embodyrl.algorithms.iql.estimator:IQL",
    "opo": "embodyrl.algorithms.objectives.outcomes:OPO",
    "pass_at_k": "embodyrl.algorithms.objectives.outcomes:PASS_AT_K",
    "reinforce_pp": "embodyrl.algorithms.objectives.estimators:REINFORCE_PP",
    "reinforce_pp_baseline": "embodyrl.algorithms.objectives.estimators:REINFORCE_PP_BASELINE",
    "remax": "embodyrl.algorithms.objectives.estimators:REMAX",
    "rloo": "embodyrl.algorithms.objectives.outcomes:RLOO",
    "sac": "embodyrl.algorithms.off_policy.estimator:SAC",
    "td3_bc": "embodyrl.algorithms.off_policy.td3_bc:TD3_BC",
}
"""Advantage estimators (`algorithm.adv_type`); entry-point group `embodyrl.advantages`."""

LOSSES = {
    "aipo": "embodyrl.algorithms.objectives.losses:AIPO",
    "aipo_ratio": "embodyrl.algorithms.objectives.losses:AIPO_RATIO",
    "cispo": "embodyrl.algorithms.objectives.losses:CISPO",
    "clip_cov": "embodyrl.algorithms.objectives.losses:CLIP_COV",
    "dro": "embodyrl.algorithms.objectives.losses:DRO",
    "gmpo": "embodyrl.algorithms.objectives.losses:GMPO",
    "gspo": "embodyrl.algorithms.objectives.losses:GSPO",
    "kl_cov": "embodyrl.algorithms.objectives.losses:KL_COV",
    "pg": "embodyrl.algorithms.objectives.losses:PG",
    "ppo_clip": "embodyrl.algorithms.policy_losses:PPO_CLIP",
    "sapo": "embodyrl.algorithms.objectives.losses:SAPO",
    "topr": "embodyrl.algorithms.objectives.losses:TOPR",
}
"""Policy losses (`algorithm.loss_type`); entry-point group `embodyrl.losses`."""

REWARDS = {
    "choice": "embodyrl.text.rewards.functions:choice",
    "code": "embodyrl.text.rewards.functions:code",
    "countdown": "embodyrl.text.rewards.functions:countdown",
    "exact": "embodyrl.text.rewards.functions:exact",
    "format": "embodyrl.text.rewards.functions:tagged",
    "gsm8k": "embodyrl.text.rewards.functions:gsm8k",
    "gsm8k_flexible": "embodyrl.text.rewards.functions:gsm8k_flexible",
    "math": "embodyrl.text.rewards.functions:math_reward",
    "number": "embodyrl.text.rewards.functions:number",
    "overlap": "embodyrl.text.rewards.functions:overlap",
}
"""Reward functions: of replies (`reward.name`) and of steps (`reward.path`); entry-point group `embodyrl.rewards`."""

MONITORS = {
    "console": "embodyrl.monitor.console:ConsoleMonitor",
    "jsonl": "embodyrl.monitor.jsonl:JsonlMonitor",
    "mlflow": "embodyrl.monitor.hosted:MlflowMonitor",
    "swanlab": "embodyrl.monitor.hosted:SwanlabMonitor",
    "tensorboard": "embodyrl.monitor.tensorboard:TensorboardMonitor",
    "trackio": "embodyrl.monitor.hosted:TrackioMonitor",
    "wandb": "embodyrl.monitor.hosted:WandbMonitor",
}
"""Loggers (`runner.logger.backends`); entry-point group `embodyrl.monitors`."""

LAUNCHERS = {
    "inline": "embodyrl.cluster.inline:InlineLauncher",
    "local": "embodyrl.cluster.local:LocalLauncher",
    "ray": "embodyrl.cluster.ray_cluster.launcher:RayLauncher",
}
"""Launchers of worker processes (`launcher.name`); entry-point group `embodyrl.launchers`."""

COMMANDS = {
    "card": "embodyrl.cli.report:card",
    "check-env": "embodyrl.commands.check_env:check_env",
    "ckpt": "embodyrl.cli.checkpoints:ckpt",
    "collect": "embodyrl.commands.collect:collect",
    "completion": "embodyrl.cli.discover.command:completion",
    "convert": "embodyrl.cli.convert:convert",
    "dagger": "embodyrl.commands.dagger:dagger",
    "data": "embodyrl.cli.data:data",
    "doctor": "embodyrl.cli.doctor.command:doctor",
    "eval": "embodyrl.commands.evaluate:evaluate",
    "export-env": "embodyrl.cli.export_env:export_env",
    "list": "embodyrl.cli.discover.command:list_names",
    "new": "embodyrl.cli.new:new",
    "play": "embodyrl.cli.play:play",
    "push": "embodyrl.cli.checkpoints:push",
    "report": "embodyrl.cli.report:report",
    "serve": "embodyrl.cli.serve:serve",
    "sft": "embodyrl.commands.sft:sft",
    "show": "embodyrl.cli.discover.command:show",
    "train": "embodyrl.commands.train:train",
    "view": "embodyrl.cli.report:view",
}
"""Commands of `embodyrl`; entry-point group `embodyrl.commands`. Their flags and help are in `cli/commands.toml`."""

EXTRAS = {
    "gguf": "gguf",
    "h5py": "convert",
    "libero": "libero",
    "mani_skill": "maniskill",
    "meshoptimizer": "libero",
    "metaworld": "metaworld",
    "msgpack": "serve",
    "mujoco": "libero",
    "ray": "ray",
    "robosuite": "libero",
    "sapien": "maniskill",
    "vllm": "vllm",
    "websockets": "serve",
}
"""The pip extra that installs an optional module, by module."""
