"""The parts that a name selects: eight tables from names to import paths, and the pip extras of optional packages.

Add a part by adding one line here. A package outside adds parts with entry points of the same groups; every key that
takes a name also takes `package.module:attribute`. Everything else in embodyrl is a plain import.
"""

ENVIRONMENTS = {
    "functional": "embodyrl.envs.functional.factory:FACTORY",
    "gym": "embodyrl.envs.gym.factory:FACTORY",
    "gym_history": "embodyrl.envs.history:GYM",
    "libero": "embodyrl.envs.libero.factory:FACTORY",
    "libero_history": "embodyrl.envs.history:LIBERO",
    "maniskill": "embodyrl.envs.maniskill.factory:FACTORY",
    "maniskill_history": "embodyrl.envs.history:MANISKILL",
    "metaworld": "embodyrl.envs.metaworld.factory:FACTORY",
    "metaworld_history": "embodyrl.envs.history:METAWORLD",
    "openenv": "embodyrl.extensions.openenv.factory:FACTORY",
    "robots": "embodyrl.envs.robots.factory:FACTORY",
    "robots_history": "embodyrl.envs.history:ROBOTS",
    "tabletop": "embodyrl.envs.tabletop.factory:FACTORY",
    "tabletop_history": "embodyrl.envs.history:TABLETOP",
    "text": "embodyrl.envs.text.factory:FACTORY",
    "text_game": "embodyrl.envs.text.game:FACTORY",
}
"""Environment factories (`env.env_type`); entry-point group `embodyrl.envs`."""

POLICIES = {
    "act": "embodyrl.policies.act:FACTORY",
    "causal_lm": "embodyrl.policies.causal_lm:CAUSAL_LM",
    "causal_lm_tiny": "embodyrl.policies.causal_lm:TINY",
    "cnn": "embodyrl.policies.actor_critic:CNN",
    "diffusion": "embodyrl.policies.diffusion:FACTORY",
    "flow_small": "embodyrl.policies.flow.small:FACTORY",
    "lerobot": "embodyrl.policies.lerobot_process:FACTORY",
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
    "filtered_bc": "embodyrl.extensions.off_policy.filtered_bc:FILTERED_BC",
    "gae": "embodyrl.algorithms.estimators:GAE",
    "gdpo": "embodyrl.extensions.objectives.outcomes:GDPO",
    "gigpo": "embodyrl.extensions.objectives.estimators:GIGPO",
    "gpg": "embodyrl.extensions.objectives.outcomes:GPG",
    "grpo": "embodyrl.algorithms.estimators:GRPO",
    "iql": "embodyrl.extensions.iql.estimator:IQL",
    "opo": "embodyrl.extensions.objectives.outcomes:OPO",
    "pass_at_k": "embodyrl.extensions.objectives.outcomes:PASS_AT_K",
    "reinforce_pp": "embodyrl.extensions.objectives.estimators:REINFORCE_PP",
    "reinforce_pp_baseline": "embodyrl.extensions.objectives.estimators:REINFORCE_PP_BASELINE",
    "remax": "embodyrl.extensions.objectives.estimators:REMAX",
    "rloo": "embodyrl.extensions.objectives.outcomes:RLOO",
    "sac": "embodyrl.extensions.off_policy.estimator:SAC",
}
"""Advantage estimators (`algorithm.adv_type`); entry-point group `embodyrl.advantages`."""

LOSSES = {
    "aipo": "embodyrl.extensions.objectives.losses:AIPO",
    "aipo_ratio": "embodyrl.extensions.objectives.losses:AIPO_RATIO",
    "cispo": "embodyrl.extensions.objectives.losses:CISPO",
    "clip_cov": "embodyrl.extensions.objectives.losses:CLIP_COV",
    "dro": "embodyrl.extensions.objectives.losses:DRO",
    "gmpo": "embodyrl.extensions.objectives.losses:GMPO",
    "gspo": "embodyrl.extensions.objectives.losses:GSPO",
    "kl_cov": "embodyrl.extensions.objectives.losses:KL_COV",
    "pg": "embodyrl.extensions.objectives.losses:PG",
    "ppo_clip": "embodyrl.algorithms.policy_losses:PPO_CLIP",
    "sapo": "embodyrl.extensions.objectives.losses:SAPO",
    "topr": "embodyrl.extensions.objectives.losses:TOPR",
}
"""Policy losses (`algorithm.loss_type`); entry-point group `embodyrl.losses`."""

REWARDS = {
    "choice": "embodyrl.extensions.text.rewards.functions:choice",
    "code": "embodyrl.extensions.text.rewards.functions:code",
    "countdown": "embodyrl.extensions.text.rewards.functions:countdown",
    "exact": "embodyrl.extensions.text.rewards.functions:exact",
    "format": "embodyrl.extensions.text.rewards.functions:tagged",
    "gsm8k": "embodyrl.extensions.text.rewards.functions:gsm8k",
    "gsm8k_flexible": "embodyrl.extensions.text.rewards.functions:gsm8k_flexible",
    "math": "embodyrl.extensions.text.rewards.functions:math",
    "number": "embodyrl.extensions.text.rewards.functions:number",
    "overlap": "embodyrl.extensions.text.rewards.functions:overlap",
}
"""Reward functions: of replies (`reward.name`) and of steps (`reward.path`); entry-point group `embodyrl.rewards`."""

MONITORS = {
    "console": "embodyrl.monitor.console:ConsoleMonitor",
    "jsonl": "embodyrl.monitor.jsonl:JsonlMonitor",
    "mlflow": "embodyrl.extensions.reporting.hosted:MlflowMonitor",
    "swanlab": "embodyrl.extensions.reporting.hosted:SwanlabMonitor",
    "tensorboard": "embodyrl.monitor.tensorboard:TensorboardMonitor",
    "trackio": "embodyrl.extensions.reporting.hosted:TrackioMonitor",
    "wandb": "embodyrl.extensions.reporting.hosted:WandbMonitor",
}
"""Loggers (`runner.logger.backends`); entry-point group `embodyrl.monitors`."""

LAUNCHERS = {
    "inline": "embodyrl.cluster.inline:InlineLauncher",
    "local": "embodyrl.cluster.local:LocalLauncher",
    "ray": "embodyrl.extensions.ray_cluster.launcher:RayLauncher",
}
"""Launchers of worker processes (`launcher.name`); entry-point group `embodyrl.launchers`."""

COMMANDS = {
    "bench": "embodyrl.extensions.discover.bench:bench",
    "card": "embodyrl.extensions.reporting.command:card",
    "check-env": "embodyrl.extensions.check_env.command:check_env",
    "ckpt": "embodyrl.extensions.checkpoints.command:ckpt",
    "collect": "embodyrl.extensions.demonstrations.collect:collect",
    "completion": "embodyrl.extensions.discover.command:completion",
    "convert": "embodyrl.extensions.conversion.command:convert",
    "dagger": "embodyrl.extensions.demonstrations.dagger:dagger",
    "data": "embodyrl.extensions.experience.command:data",
    "doctor": "embodyrl.extensions.doctor.command:doctor",
    "eval": "embodyrl.commands.evaluate:evaluate",
    "export-env": "embodyrl.extensions.own_loop.export_env:export_env",
    "list": "embodyrl.extensions.discover.command:list_things",
    "new": "embodyrl.extensions.templates.new:new",
    "play": "embodyrl.extensions.cockpit.command:play",
    "push": "embodyrl.extensions.checkpoints.command:push",
    "recap": "embodyrl.extensions.recap.command:recap",
    "report": "embodyrl.extensions.reporting.command:report",
    "results": "embodyrl.extensions.results.command:results",
    "serve": "embodyrl.extensions.serving.command:serve",
    "sft": "embodyrl.extensions.demonstrations.sft:sft",
    "show": "embodyrl.extensions.discover.command:show",
    "train": "embodyrl.commands.train:train",
    "view": "embodyrl.extensions.reporting.command:view",
}
"""Commands of `embodyrl`; entry-point group `embodyrl.commands`. Their flags and help are in `cli/commands.toml`."""

EXTRAS = {
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
    "websockets": "serve",
}
"""The pip extra that installs an optional module, by module."""
