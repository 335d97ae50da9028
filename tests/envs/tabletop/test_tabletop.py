import itertools
import math

import numpy as np
import pytest
from settings import env_of

from embodyrl.envs import ENVS
from embodyrl.envs.protocol import EnvContext
from embodyrl.envs.settings import InitParams
from embodyrl.envs.tabletop.sims import expert_action
from embodyrl.envs.tabletop.world import PLATE_RADIUS, PUSH_RADIUS, TASKS, Axis, Skill, Task, World, create_world
from embodyrl.plan.config import load_config
from embodyrl.types import EpisodeStart

FACTORY = ENVS.get("tabletop")
SIZE = 112


def config(**changes):
    params = InitParams(camera_heights=SIZE, camera_widths=SIZE, camera_names=["front", "wrist"])
    return env_of(**{"env_type": "tabletop", "init_params": params, **changes})


def make(env_indices=1, **changes):
    return FACTORY.make(config(**changes), EnvContext(num_envs=env_indices))


def start(reset_id, *, limit=48, seed=0, ignore=False):
    return EpisodeStart(reset_id=reset_id, seed=seed, max_episode_steps=limit, ignore_terminations=ignore)


def see(env, env_index=0):
    images, state = np.zeros((2, SIZE, SIZE, 3), np.uint8), np.zeros(4, np.float32)
    env.observe([env_index], images[None], state[None])
    return images, state


def world(skill, *, blocks=((0.1, 0.0), (-0.2, -0.2), (0.2, -0.2)), z=0.0, closed=False):
    plates = ((0.1, 0.2), (-0.2, 0.2), (0.0, 0.2))
    return World(Task(skill, 0, 0), list(blocks), plates, 0.0, 0.0, z, closed)


def moves(*rows):
    actions = np.zeros((1, len(rows), 7), np.float32)
    for action, (x, y, z, gripper) in zip(actions[0], rows, strict=True):
        action[:3], action[6] = (x, y, z), gripper
    return actions


def test_instructions_are_unique():
    spec = FACTORY.spec(config(), EnvContext())
    assert len(set(spec.tasks)) == len(TASKS) == 21
    assert spec.tasks[0] == "touch the red block"
    assert spec.tasks[7] == "push the green block to the purple plate"
    assert spec.tasks[20] == "put the blue block on the white plate"
    assert spec.num_reset_ids >= 21 * 2000


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("skill", list(Skill))
def test_the_expert_solves_its_tasks(skill, noise):
    env = make(16)
    tasks = [index for index, task in enumerate(TASKS) if task.skill is skill]
    solved, steps, episodes = 0, 0, 0
    for task in tasks:
        ids = env.spec.get_reset_ids(task)[: 96 // len(tasks) // 16 * 16 or 16]
        for first in range(0, len(ids), 16):
            env_indices = list(range(16))
            env.reset(env_indices, [start(ids[first + env_index], seed=env_index) for env_index in env_indices])
            _, result = env.expert_chunk(env_indices, 48, noise=noise)
            solved += int(result.terminated.any(axis=1).sum())
            steps += int(result.valid.sum())
            episodes += 16
    assert solved >= (episodes if noise == 0.0 else 0.95 * episodes)
    assert steps / episodes < {Skill.touch: 12, Skill.push: 24, Skill.put: 32}[skill]


def test_expert_noise_affects_executed_actions_only():
    env = make(2)
    env.reset([0, 1], [start(60000), start(60000)])
    quiet, _ = env.expert_chunk([0], 1, noise=0.0)
    loud, _ = env.expert_chunk([1], 1, noise=0.5)
    assert quiet.tolist() == loud.tolist()
    assert see(env, 0)[1].tolist() != see(env, 1)[1].tolist()


def test_expert_noise_excludes_the_gripper():
    env = make(20)
    env.reset(range(20), [start(60000, seed=seed) for seed in range(20)])
    clean, _ = env.expert_chunk(range(20), 1, noise=3.0)
    assert (clean == clean[0]).all()
    assert len({see(env, env_index)[1][0] for env_index in range(20)}) > 2, "the arm is shaken"
    assert len({see(env, env_index)[1][3] for env_index in range(20)}) == 1, "the fingers are not"


def test_reset_ids_determine_distinct_layouts():
    layouts = {tuple(create_world(TASKS[0], i).blocks) for i in range(500)}
    assert len(layouts) == 500
    env = make(2)
    env.reset([0, 1], [start(1234, seed=1), start(1234, seed=1)])
    env.step_chunk([0], moves(*[(1, -1, -1, 1)] * 5))
    env.reset([0], [start(1234, seed=1)])
    for one, other in zip(see(env, 0), see(env, 1), strict=True):
        assert one.tobytes() == other.tobytes()


def test_initial_layouts_have_no_overlap_and_no_solved_task():
    for index in range(0, 84000, 97):
        task = TASKS[index // 4000]
        table = create_world(task, index)
        gaps = [math.dist(a, b) for i, a in enumerate(table.blocks) for b in table.blocks[:i]]
        assert min(gaps) > 0.13
        assert min(math.dist(a, b) for a in table.blocks for b in table.plates) > PLATE_RADIUS
        assert not table.success()


def test_blocks_can_be_grasped_carried_and_released():
    table = world(Skill.put, blocks=((0.03, 0.0), (-0.2, -0.2), (0.2, -0.2)))
    table.step(0, 0, 0, True)
    assert table.held_block == 0
    assert table.blocks[0] == (0.0, 0.0)
    for _ in range(5):
        table.step(0.5, 1, 1, True)
    assert table.blocks[0] == pytest.approx((0.1, 0.2))
    assert not table.success(), "still in the hand"
    table.step(0, 0, 0, False)
    assert table.success()
    assert table.blocks[0] == pytest.approx((0.1, 0.2))


@pytest.mark.parametrize(("x", "z", "caught"), [(0.039, 0.0, True), (0.041, 0.0, False), (0.0, 0.036, False)])
def test_fingers_grasp_only_blocks_between_them(x, z, caught):
    table = world(Skill.put, blocks=((x, 0.0), (-0.2, -0.2), (0.2, -0.2)), z=z)
    table.step(0, 0, 0, True)
    assert (table.held_block == 0) is caught
    table.blocks[0] = (0.0, 0.0)
    table.z = 0.0
    table.step(0, 0, 0, True)
    assert (table.held_block == 0) is caught, "only the moment of closing counts"


def test_closed_low_gripper_pushes_blocks():
    pushing, straddling, above = (
        world(Skill.push, closed=True),
        world(Skill.push),
        world(Skill.push, z=0.05, closed=True),
    )
    for table, close in ((pushing, True), (straddling, False), (above, True)):
        table.blocks[0] = (0.1, 0.02)
        for _ in range(4):
            table.step(1, 0, 0, close)
    x, y = pushing.blocks[0]
    assert math.dist((x, y), (pushing.x, pushing.y)) == pytest.approx(PUSH_RADIUS)
    assert y == 0.02
    assert x > 0.19
    assert straddling.blocks[0] == above.blocks[0] == (0.1, 0.02)


def test_lifting_does_not_count_as_pushing():
    table = world(Skill.push, blocks=((0.0, 0.0), (-0.2, -0.2), (0.2, -0.2)))
    table.step(0, 0, 0, True)
    for _ in range(5):
        table.step(0.5, 1, 1, True)
    table.step(0, 0, 0, False)
    assert math.dist(table.blocks[0], table.plates[0]) < 0.001
    assert not table.success()
    table.step(0, 0, 0, True)
    assert table.held_block is None
    assert not table.success(), "nor later, when the fingers close on nothing"


def test_wrong_block_or_plate_has_no_reward():
    put_red_on_yellow = next(i for i, t in enumerate(TASKS) if t == Task(Skill.put, 0, 0))
    table = create_world(TASKS[put_red_on_yellow], 48000)
    for block in range(3):
        for plate in range(3):
            table.blocks = [(0.0, -0.2), (0.1, -0.2), (0.2, -0.2)]
            table.blocks[block] = table.plates[plate]
            assert table.success() is (block == 0 and plate == 0)


def test_success_ends_the_episode_with_reward_one():
    env = make()
    task = TASKS.index(Task(Skill.put, 1, 2))
    env.reset([0], [start(env.spec.get_reset_ids(task)[5])])
    _, result = env.expert_chunk([0], 48, noise=0.0)
    last = int(result.valid.sum()) - 1
    assert result.reward.sum() == result.reward[0, last] == 1.0
    assert result.terminated[0, last]


def test_expert_keeps_the_goal_satisfied_after_success():
    env = make()
    for task in (0, 3, 12):
        env.reset([0], [start(env.spec.get_reset_ids(task)[1], ignore=True, limit=60)])
        _, result = env.expert_chunk([0], 60, noise=0.0)
        assert result.success[0].any()
        assert task == 0 or result.success[0, -1]


def test_state_changes_with_the_actions():
    env = make()
    env.reset([0], [start(0)])
    before = see(env)[1]
    env.step_chunk([0], moves((1, 0, 0, -1), (0, 0, 0, 0)))
    assert see(env)[1][3] == 1.0, "0 does not close"
    env.step_chunk([0], moves((0.5, -1, -0.25, 1)))
    assert see(env)[1] - before == pytest.approx([0.06, -0.04, -0.01, -1.0], abs=1e-6)


@pytest.mark.parametrize("name", ["red", "green", "blue"])
def test_blocks_are_rendered_at_their_positions(name):
    env = make()
    env.reset([0], [start(77)])
    table = create_world(TASKS[0], 77)
    index = ("red", "green", "blue").index(name)
    image = see(env)[0][0].astype(int)
    others = np.delete(image, index, axis=2).max(axis=2)
    rows, cols = np.nonzero(image[:, :, index] > others + 60)
    assert len(rows) >= 36, "at least 6 x 6 pixels"
    x = (cols.mean() + 0.5) / SIZE * 0.72 - 0.36
    assert x == pytest.approx(table.blocks[index][0], abs=0.01)


def test_wrist_view_centers_the_block_under_the_gripper():
    env = make()
    env.reset([0], [start(env.spec.get_reset_ids(0)[3])])
    env.expert_chunk([0], 48, noise=0.0)
    wrist = see(env)[0][1]
    red, green, blue = wrist[SIZE // 2, SIZE // 2].astype(int)
    assert red > 150
    assert max(green, blue) < 100


def test_camera_images_change_with_height_and_gripper():
    env = make()
    env.reset([0], [start(9)])
    seen = [see(env)[0]]
    for row in ((0, 0, -1, -1), (0, 0, 0, 1)):
        env.step_chunk([0], moves(row))
        seen.append(see(env)[0])
    for before, after in itertools.pairwise(seen):
        for camera in range(2):
            changed = np.abs(before[camera].astype(int) - after[camera].astype(int)).max(axis=2) > 40
            assert changed.sum() >= 8


def test_camera_images_follow_the_order_of_camera_names():
    cameras = InitParams(camera_heights=SIZE, camera_widths=SIZE, camera_names=["wrist", "front"])
    usual, other = make(), make(init_params=cameras)
    for env in (usual, other):
        env.reset([0], [start(77)])
    np.testing.assert_array_equal(see(other)[0], see(usual)[0][::-1])


def test_render_shows_both_views():
    env = make()
    env.reset([0], [start(9)])
    frame = env.render(0)
    assert frame.dtype == np.uint8
    assert frame.shape[1] == 2 * frame.shape[0] >= 512


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"init_params": InitParams(camera_names=["frnt"])},
            "'frnt' is not a camera of this environment. Did you mean 'front'?",
        ),
        ({"init_params": InitParams(camera_names=["front", "front"])}, "contains a camera twice"),
        ({"init_params": InitParams(camera_heights=64, camera_widths=96, camera_names=["front"])}, "differ"),
        ({"init_params": InitParams(camera_heights=16, camera_widths=16, camera_names=["front"])}, "32..1024"),
    ],
)
def test_invalid_tabletop_setting_error_contains_a_fix(changes, words):
    problems = FACTORY.validate(config(**changes))
    assert any(words in problem for problem in problems), problems


def test_presets_use_separate_validation_layouts():
    cfg = load_config("train", ["env=tabletop", "model=scripted"])
    assert FACTORY.validate(cfg.env) == []
    spec = FACTORY.spec(cfg.env, EnvContext())
    assert cfg.env.train.state_ids
    assert cfg.env.eval.state_ids
    train, held_out = ({*range(first, last + 1)} for first, last in (cfg.env.train.state_ids, cfg.env.eval.state_ids))
    assert not train & held_out
    assert max(train | held_out) < spec.states_per_task[0]
    assert cfg.env.train.max_episode_steps == cfg.env.eval.max_episode_steps == spec.max_episode_steps


def on_axes(*suites, axis="base"):
    cfg = config(axis=Axis(axis))
    return FACTORY.spec(cfg, EnvContext(num_envs=2, suites=suites)), cfg


def test_each_variation_changes_one_property():
    """Table 77 of task 0 with each variation."""
    spec, cfg = on_axes(*FACTORY.suites(config()))
    assert spec.benchmark.suites[::21] == ("tabletop", "tabletop_colours", "tabletop_positions", "tabletop_phrasings")
    sims = FACTORY.simulators(cfg, EnvContext(num_envs=4, suites=FACTORY.suites(cfg)))
    for env_index in range(4):
        sims.reset_env(env_index, spec.get_reset_ids(21 * env_index)[77], 0)
    base, colors, positions, phrasings = (sims._worlds[env_index] for env_index in range(4))
    assert (base.blocks, base.plates) == (colors.blocks, colors.plates) == (phrasings.blocks, phrasings.plates)
    assert [(x, -y) for x, y in base.blocks] == positions.blocks
    assert (base.x, -base.y) == (positions.x, positions.y)
    assert max(y for _, y in positions.plates) < 0 < min(y for _, y in base.plates)
    pictures = [sims.render(env_index) for env_index in range(4)]
    assert (pictures[0] == pictures[3]).all()
    assert all((pictures[0] != picture).any() for picture in pictures[1:3])
    assert len({*spec.tasks[:21], *spec.tasks[63:]}) == 42
    assert spec.tasks[21:63] == spec.tasks[:21] * 2


def test_expert_solves_every_variation():
    for axis in Axis:
        for number, task in enumerate(TASKS):
            table, steps = create_world(task, 4000 * number + 3001, axis), 0
            while not table.success() and steps < 48:
                dx, dy, dz, *_, gripper = expert_action(table).tolist()
                table.step(dx, dy, dz, gripper > 0)
                steps += 1
            assert table.success(), (axis, task)
