"""MkDocs hook that generates pages while the site is built: keys, commands, API, parts, environments, checkpoints."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from textwrap import dedent, indent
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

from embodyrl import parts
from embodyrl.cli.commands import COMMANDS
from embodyrl.cli.output import get_help
from embodyrl.config import compose
from embodyrl.config.plain_yaml import read_plain_yaml
from embodyrl.config.settings import Key, Settings, format_value
from embodyrl.envs.robots.presets import PIXEL_PRESETS
from embodyrl.errors import MissingDependencyError
from embodyrl.plan.config import load_config
from embodyrl.plan.environment import env_spec
from embodyrl.plan.keys import all_keys
from embodyrl.plan.schema import Config
from embodyrl.types import ActionKind, ActionSpec, EnvSpec, RewardSpec


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the generated pages."""
    for page in (configuration, commands, api, registered, environments, zoo):
        name = "parts" if page is registered else page.__name__
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    return files


def configuration() -> str:
    """Return the page of all groups with their options, and all keys with type, default and meaning."""
    lines = ["# Configuration", "", "`group=option` selects a component, `key=value` sets a key."]
    lines += ["`embodyrl show env=libero_10` prints the keys of one choice of components with their values."]
    lines += ["This page lists the keys of all components of the package.", "", "## Options", ""]
    for group in compose.default_options("train"):
        lines += [f"### {group}=", ""]
        lines += [f"`{name}`\n:   {get_help(group, name, file)}\n" for name, file in compose.options(group).items()]
    sections: dict[str, list[Key]] = {}
    for key in all_keys().values():
        sections.setdefault(key.name.split(".")[0] if "." in key.name else "top level", []).append(key)
    for section, keys in sections.items():
        lines += ["", f"## {section}", "", *_key_list(keys)]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """Return the page of all commands with usage, flags and examples."""
    lines = ["# Commands", "", "`embodyrl COMMAND --help` prints the same."]
    for name, command in COMMANDS.items():
        lines += ["", f"## {name}", "", command.summary, "", f"    {command.usage}", ""]
        flags = [f"| `{flag}` | {_cell(options['help'])} |" for flag, options in command.flags.items()]
        lines += ["| flag | |", "|---|---|", *flags, ""] if flags else []
        lines += ["Examples:", "", *(f"    {example}" for example in command.examples)]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Task:
    """A task of the API reference: an example, and the modules whose public names it needs."""

    title: str
    example: str
    modules: tuple[str, ...]


API = tuple(
    Task(title, text, tuple(modules.split()))
    for title, modules, text in (
        (
            "Train and evaluate",
            "embodyrl",
            """
            import embodyrl

            cfg = embodyrl.compose("train", "experiment=cartpole", "runner.max_steps=1", "eval.episodes=2")
            result = embodyrl.train(cfg, on_step=lambda step, metrics: print(step, metrics["train/return"]))
            print(embodyrl.evaluate(embodyrl.compose("eval", f"ckpt={result.run}")))
            """,
        ),
        (
            "Step an environment",
            "embodyrl.api.environment",
            """
            import embodyrl

            env = embodyrl.make_env("tabletop", "env.eval.task_ids=[0]")
            obs, info = env.reset(seed=0)
            print(obs["instruction"], obs["images"].shape, obs["state"])
            obs, reward, terminated, truncated, info = env.step([1.0, 0, 0, 0, 0, 0, -1.0])
            """,
        ),
        (
            "Write a reward",
            "embodyrl.envs.reward",
            """
            from embodyrl.envs.reward import RewardStep


            def low_gripper(step: RewardStep) -> dict[str, float]:  # env=tabletop: state is [x, y, z, opening]
                return {"success": float(step.success), "height": -0.1 * float(step.observation.state[2])}


            low_gripper.components = ("success", "height")
            """,
        ),
        (
            "Write an environment",
            "embodyrl.envs.simulators embodyrl.envs.protocol embodyrl.specs",
            """
            import numpy as np

            from embodyrl.envs.simulators import SequentialSimulators, SimStep
            from embodyrl.specs import ActionSpec, EnvSpec, RewardSpec


            class Line(SequentialSimulators):
                place: dict[int, float] = {}

                def reset_env(self, env_index, reset_id, seed):
                    self.place[env_index] = reset_id / 10

                def step_env(self, env_index, action):
                    self.place[env_index] += 0.1 * float(action[0])
                    success = self.place[env_index] >= 1
                    return SimStep(reward=float(success), terminated=success, success=success)

                def observe_env(self, env_index, out):
                    out.state[:] = self.place[env_index]


            spec = EnvSpec(
                name="line", action=ActionSpec(dim=1), tasks=("go right",), states_per_task=(10,), state_dim=1
            )
            sims = Line(spec)
            sims.reset(np.array([0]), np.array([9]), np.array([0]))
            print(sims.step(np.array([0]), np.ones((1, 1), np.float32)).success)
            """,
        ),
        (
            "Write a loss or an advantage",
            "embodyrl.algorithms.protocol",
            """
            import torch

            from embodyrl.algorithms.protocol import LossTerms, PolicyLoss, LossUnits


            def reinforce(units: LossUnits, cfg) -> LossTerms:
                ratio = (units.logprob - units.old_logprob).exp()
                return LossTerms(
                    loss=-units.advantage * units.logprob, ratio=ratio, clipped=torch.zeros_like(ratio).bool()
                )


            LOSS = PolicyLoss(compute=reinforce)  # algorithm.loss_type=my_module:LOSS
            logprob, one = torch.zeros(2, 1, 1, requires_grad=True), torch.ones(2, 1, 1)
            units = LossUnits(logprob=logprob, old_logprob=0 * one, advantage=one, valid=one.bool())
            LOSS.compute(units, None).loss.sum().backward()
            """,
        ),
        (
            "Write a policy",
            "embodyrl.policies.protocol",
            """
            import embodyrl
            from embodyrl.plan.environment import env_spec
            from embodyrl.policies import POLICIES

            cfg = embodyrl.compose("train", "experiment=cartpole")
            factory = POLICIES.get(cfg.model.model_type)  # `embodyrl new policy my_policy` generates another one
            print(factory.spec(cfg.model, env_spec(cfg), value_dim=1))
            """,
        ),
        (
            "Write a logger",
            "embodyrl.monitor.protocol",
            """
            from embodyrl.monitor import Monitor


            class Last(Monitor):  # runner.logger.backends=[console,jsonl,my_module:Last]
                def log(self, step, metrics):
                    print(step, metrics.get("train/return"))
            """,
        ),
        (
            "Write a launcher",
            "embodyrl.cluster.protocol",
            """
            from embodyrl.cluster import LAUNCHERS

            print(LAUNCHERS.get("inline").__doc__)  # `embodyrl new launcher my_launcher` derives from this class
            """,
        ),
        ("Look up the records", "embodyrl.types", ""),
    )
)
"""Tasks of the API reference; tests/docs runs the examples."""


def api() -> str:
    """Return the page of public names, grouped by task, with signatures and docstrings."""
    lines = ["# Python API", "", "Grouped by task. The tests run the examples. Tutorial:"]
    lines += ["[from Python](../tutorials/program.md)."]
    for task in API:
        lines += ["", f"## {task.title}"]
        if task.example:
            lines += ["", "```python", dedent(task.example).strip(), "```"]
        for name in task.modules:
            module = importlib.import_module(name)
            lines += ["", f"`{name}`: {_prose(module, below=False)}"]
            for part in getattr(module, "__all__", None) or vars(module):
                value = getattr(module, part)
                own = hasattr(module, "__all__") or getattr(value, "__module__", None) == name
                if not part.startswith("_") and own and (inspect.isclass(value) or inspect.isfunction(value)):
                    lines += _entry(part, value, "###")
                    members = vars(value).items() if inspect.isclass(value) else ()
                    for member, inner in members:
                        if not member.startswith("_") and (inspect.isfunction(inner) or isinstance(inner, property)):
                            lines += _entry(f"{part}.{member}", inner, "####")
    return "\n".join(lines) + "\n"


TABLES = {
    "envs": ("Environments", parts.ENVIRONMENTS),
    "policies": ("Policies", parts.POLICIES),
    "advantages": ("Advantage estimators", parts.ADVANTAGES),
    "losses": ("Policy losses", parts.LOSSES),
    "rewards": ("Rewards", parts.REWARDS),
    "monitors": ("Monitors", parts.MONITORS),
    "launchers": ("Launchers", parts.LAUNCHERS),
    "commands": ("Commands", parts.COMMANDS),
}
"""Title and table of each entry-point group `embodyrl.<group>`."""


def registered() -> str:
    """Return the page of the parts that a name selects."""
    lines = ["# Parts", "", "A package adds parts with entry points of these groups. Each key that takes a name also"]
    lines += ["takes `package.module:attribute`. `embodyrl list extras` shows the optional packages."]
    for group, (title, table) in TABLES.items():
        lines += ["", f"## {title}", "", f"Entry-point group `embodyrl.{group}`.", ""]
        lines += [f"`{name}`\n:   `{target}`\n" for name, target in table.items()]
    return "\n".join(lines) + "\n"


EXAMPLES = {
    "functional": ("env.id=gymnax:CartPole-v1",),
    "gym": ("env.id=CartPole-v1",),
    "maniskill": ("env.id=PushCube-v1",),
    "metaworld": ("env.id=MT10",),
}
"""Further arguments of options that select one of many environments."""
GIVEN = {"text/gsm8k": "data.path", "text/math": "data.path", "text/openenv": "env.url"}
"""Key that determines an option completely: rows of the user, or a server."""
COLUMNS = ("`env=`", "observation", "action", "reward", "success", "initial states")


def environments() -> str:
    """Return the page of all environments, with the specs and settings that a run uses."""
    lines = [
        "# Environments",
        "",
        "All options of `env=` with their defaults. Options in one row differ in their tasks.",
    ]
    lines += ["Presets of a policy may select other cameras (`embodyrl show env=NAME model=NAME`)."]
    lines += ["`embodyrl check-env env=NAME` checks an environment on your machine.", ""]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in compose.options("env"):
        label = " ".join((_family(name), *EXAMPLES.get(name, ())))
        labels = rows.setdefault(_environment(name), [])
        labels += [label] if label not in labels else []
    lines += [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for cells, labels in rows.items():
        lines.append(f"| {_codes(labels)} | {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _family(option: str) -> str:
    """Return the common pattern of perturbed suites, for example libero_pro_*; return other options unchanged."""
    families = read_plain_yaml(compose.conf_dir() / "variants.yaml")["env"]
    return next(
        (f"{name}_*" for name, of in families.items() if "axes" in of and option.startswith(f"{name}_")), option
    )


def _environment(option: str) -> tuple[str, ...]:
    """Return observation, action, reward, success and initial states of an option of `env=`."""
    if option in GIVEN:
        return (f"determined by `{GIVEN[option]}`", *[""] * 4)
    command, model = ("train", ["model=causal_lm_tiny"]) if option.startswith("text/") else ("check-env", [])
    cfg = load_config(command, [f"env={option}", *EXAMPLES.get(option, ()), *model])
    if preset := getattr(cfg.env, "preset", None):  # each run compares the installed package with the preset
        seen = f"state: {sum(preset.state.values())} numbers"
        if pixels := PIXEL_PRESETS.get(option):
            seen += f"; with `env.pixels=true` images: {_codes(pixels.cameras)}; state: {sum(pixels.state.values())}"
        action = f"{len(preset.action)} numbers: {preset.meaning}"
        return seen, action, _reward(cfg, dense=preset.dense), preset.success, _states(cfg)
    try:
        spec = env_spec(cfg)
    except MissingDependencyError:
        return "not installed here", *[""] * 4
    reward = _reward(cfg, spec.reward, dense=spec.reward.dense)
    return _seen(spec), _action(spec.action), reward, spec.reward.success, _states(cfg, spec)


def _seen(spec: EnvSpec) -> str:
    height, width = spec.cameras.size
    parts = [f"{height} x {width} images: {_codes(spec.cameras.names)}"] if spec.cameras.names else []
    parts += [f"state: {spec.state_dim} numbers"] if spec.state_dim else []
    text = "prompt" if spec.action.kind is ActionKind.text else "instruction"
    return "; ".join([*parts, text] if spec.text.instructed else parts)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _action(action: ActionSpec) -> str:
    if action.kind is ActionKind.text:
        return "reply (text)"
    if action.kind is not ActionKind.box:
        return f"categories: {' x '.join(map(str, action.sizes))}"
    low, high = action.bounds
    same = len({*low}) == len({*high}) == 1
    gripper = f"; gripper {action.gripper.open:+g} opens" if action.gripper else ""
    return f"{action.dim} numbers" + (f", {low[0]:g} to {high[0]:g}" if same else "") + gripper


def _reward(cfg: Config, reward: RewardSpec | None = None, *, dense: bool) -> str:
    """Return the reward of a step: weighted components, or the reward of the simulator."""
    pairs = zip(reward.components, reward.weights, strict=True) if reward else ()
    text = " + ".join(f"{weight:g} {name}" for name, weight in pairs if weight)
    text = text or ("of the simulator" + (", also without success" if dense else ""))
    changes = "; change between steps" if getattr(cfg.env, "use_rel_reward", False) else ""
    factor = getattr(cfg.env, "reward_coef", 1.0)
    return text + changes + (f"; times {factor:g}" if factor != 1 else "")


def _states(cfg: Config, spec: EnvSpec | None = None) -> str:
    """Return the numbers of tasks and initial states, and the ranges for training and validation."""
    counts = {*spec.states_per_task} if spec else set()
    tasks = f"{len(spec.tasks)} tasks x " if spec and len(spec.tasks) > 1 else ""
    parts = [f"{tasks}{' or '.join(map(str, sorted(counts)))}"] if counts else []
    ids = {"training": cfg.env.train.state_ids, "validation": cfg.env.eval.state_ids}
    parts += [f"{name} {value[0]} to {value[1]}" for name, value in ids.items() if value]
    share = getattr(getattr(cfg, "data", None), "val_share", None)
    return "; ".join(
        parts + ([f"validation: the last {share:g} of the rows"] if share and not any(ids.values()) else [])
    )


def _key_list(keys: Iterable[Key]) -> Iterator[str]:
    """Yield keys with type, default and meaning; no tables, because names and types are long for a phone."""
    for key in keys:
        default = "" if key.required else f", default `{format_value(key.default)}`"
        yield f"`{key.name}`\n:   {key.doc or 'See its section.'} *({key.type_text}{default})*\n"


def _entry(name: str, value: Any, level: str) -> list[str]:
    fields = [f"- `{field}`: {doc}" for field, doc in _field_docs(value).items()] if inspect.isclass(value) else []
    return ["", f"{level} {name}", "", "```python", _signature(name, value), "```", "", _prose(value), "", *fields]


def _field_docs(kind: type) -> dict[str, str]:
    """Return the documentation of each field of a class, read from its source."""
    try:
        # Python keeps no docstrings of attributes, so the source is parsed.
        body = ast.parse(dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError, SyntaxError):  # a class without a source file, for example from an interactive session
        return {}
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for item, following in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[item.target.id] = " ".join(str(following.value.value).split())
    return docs


def _signature(name: str, value: Any) -> str:
    """Return the signature, with one parameter per line if there are several."""
    if isinstance(value, property) or (inspect.isclass(value) and issubclass(value, Enum | Settings)):
        return name
    signature = inspect.signature(value)
    words = [re.sub(r"<[^>]+>", "...", str(p)) for p in signature.parameters.values() if p.name != "self"]
    named = [
        i
        for i, p in enumerate(p for p in signature.parameters.values() if p.name != "self")
        if p.kind is p.KEYWORD_ONLY
    ]
    if named and not any(word.startswith("*") for word in words):
        words.insert(named[0], "*")
    inside = ", ".join(words) if len(words) < 3 else "\n    " + ",\n    ".join(words) + ",\n"
    back = signature.return_annotation
    gives = "" if inspect.isclass(value) or back is signature.empty else f" -> {back}"
    return f"{name}({inside}){gives}".replace("'", "")


def _prose(value: ModuleType | Any, *, below: bool = True) -> str:
    """Return a docstring as Markdown: its sections (Args, Raises) become lists."""
    text = inspect.getdoc(value) or ""
    text = text if below else text.partition("\n\n")[0]
    text = re.sub(r"^(Args|Returns|Yields|Raises):\n", r"\n**\1**\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"(\*\*(?:Returns|Yields)\*\*\n\n) +", r"\1", text)
    text = re.sub(r"^>>> .*\n(?:.+\n?)*", lambda code: indent(code[0], "    "), text, flags=re.MULTILINE)
    return re.sub(r"^    (\w[\w*, ]*): ", r"- `\1`: ", text, flags=re.MULTILINE)


def zoo() -> str:
    """Return the page of included checkpoints with their result cards."""
    lines = [
        "# Included checkpoints",
        "",
        "Small checkpoints for machines without a GPU: `model.path=assets/<name>` or `ckpt=assets/<name>`.",
    ]
    lines += ["Other folders in `assets/` are architectures without weights. Published checkpoints:"]
    lines += ["[OpenVLA-OFT](../howto/openvla_oft.md), [pi0, pi0.5, SmolVLA](../howto/flow.md)."]
    for weights in sorted(Path(__file__).parents[1].glob("assets/*/model.safetensors")):
        card = json.loads((weights.parent / "card.json").read_text(encoding="utf-8"))
        readme = (weights.parent / "README.md").read_text(encoding="utf-8")
        about = re.sub(r"\A---.*?---\s*# \S+\s*", "", readme, flags=re.DOTALL)
        lines += ["", f"## {weights.parent.name}", "", about, "", "### Measured", "", f"    {card['command']}", ""]
        for row in card["figures"][-1]["rows"]:
            lines.append(f"- {row['name']}: {row['text']}, {row['states']} initial states")
        costs = card["costs"]
        lines += ["", f"{costs['evaluation_env_steps']:,} env steps, {costs.get('cpu_hours', 0) * 60:.0f} CPU-minutes;"]
        lines += [f"embodyrl {card['embodyrl']}, commit {card['commit'] or 'not known'}, seed {card['seeds']['run']}."]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
