"""MkDocs hook that generates pages while the site is built: keys, commands, Python API, parts, checkpoints."""

from __future__ import annotations

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
from embodyrl.cli.output import about
from embodyrl.config import compose
from embodyrl.config.settings import Key, Settings, field_docs, format_value
from embodyrl.plan.keys import all_keys


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the generated pages."""
    for page in (configuration, commands, api, registered, zoo):
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
        lines += [f"`{name}`\n:   {about(group, name, file)}\n" for name, file in compose.options(group).items()]
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

            from embodyrl.envs.simulators import PerSlot, SimStep
            from embodyrl.specs import ActionSpec, EnvSpec


            class Line(PerSlot):
                place: dict[int, float] = {}

                def reset_slot(self, slot, reset_id, seed):
                    self.place[slot] = reset_id / 10

                def step_slot(self, slot, action):
                    self.place[slot] += 0.1 * float(action[0])
                    success = self.place[slot] >= 1
                    return SimStep(reward=float(success), terminated=success, success=success)

                def observe_slot(self, slot, out):
                    out.state[:] = self.place[slot]


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

            from embodyrl.algorithms.protocol import LossTerms, PolicyLoss, Units


            def reinforce(units: Units, cfg) -> LossTerms:
                ratio = (units.logprob - units.old_logprob).exp()
                return LossTerms(
                    loss=-units.advantage * units.logprob, ratio=ratio, clipped=torch.zeros_like(ratio).bool()
                )


            LOSS = PolicyLoss(compute=reinforce)  # algorithm.loss_type=my_module:LOSS
            logprob, one = torch.zeros(2, 1, 1, requires_grad=True), torch.ones(2, 1, 1)
            units = Units(logprob=logprob, old_logprob=0 * one, advantage=one, valid=one.bool())
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


def _key_list(keys: Iterable[Key]) -> Iterator[str]:
    """Yield keys with type, default and meaning; no tables, because names and types are long for a phone."""
    for key in keys:
        default = "" if key.required else f", default `{format_value(key.default)}`"
        yield f"`{key.name}`\n:   {key.doc or 'See its section.'} *({key.type_text}{default})*\n"


def _entry(name: str, value: Any, level: str) -> list[str]:
    fields = [f"- `{field}`: {doc}" for field, doc in field_docs(value).items()] if inspect.isclass(value) else []
    return ["", f"{level} {name}", "", "```python", _signature(name, value), "```", "", _prose(value), "", *fields]


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
