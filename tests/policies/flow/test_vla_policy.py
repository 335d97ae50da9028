"""pi0, pi0.5 and SmolVLA as policies, from folders in the public layouts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_flow import sample
from safetensors.torch import load_file
from tiny_vla import FORMS, build_model, write_checkpoint

from embodyrl.config.paths import resolve_asset
from embodyrl.errors import CheckpointError, ConfigError
from embodyrl.plan.build import mismatches
from embodyrl.plan.config import load_config
from embodyrl.policies import POLICIES, export_policy
from embodyrl.policies.flow.layouts import LEROBOT, OPENPI, SMOLVLA_LEROBOT, TRANSFORMERS
from embodyrl.policies.flow.likelihood import integrate_ode
from embodyrl.policies.flow.model import BACKBONE, FlowInputs
from embodyrl.policies.flow.policy import FlowPolicy
from embodyrl.policies.flow.vla.network import pad_centered, pad_left_top
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.vla.sampling import START, TIMES, sample_normals, sample_uniforms
from embodyrl.types import ActionSpec, BenchmarkSpec, CameraSpec, EnvSpec, GripperConvention, Observation

ENV = EnvSpec(
    name="probe",
    action=ActionSpec(dim=7, gripper=GripperConvention(open=-1.0, closed=1.0, binary=True)),
    tasks=("pick the red one", "open it"),
    states_per_task=(5, 5),
    cameras=CameraSpec(names=("front", "wrist"), size=(20, 28), rotation_deg=180),
    state_dim=5,
)
WAYS = {
    "sde": {},
    "all": {"stochastic_steps": "all", "num_steps": 3},
    "noise": {"likelihood": "flow_noise", "num_steps": 3},
    "fpo": {"likelihood": "fpo", "fpo_pairs": 2},
}


def folder_of(form, tmp_path, **options) -> Path:
    return write_checkpoint(tmp_path / form, form, state_dim=5, action_dim=7, **options)


def settings(form, path, **keys):
    defaults = {"num_action_chunks": 3, "precision": "fp32", "num_steps": 4}
    values = {"model_type": form, "path": str(path)} | defaults | keys
    return POLICIES.get(form).settings.model_validate(values, strict=False)


def build(form, path, *, value_dim=0, trainable=True, recompute=False, env=ENV, seed=0, **keys) -> FlowPolicy:
    cfg, factory = settings(form, path, **keys), POLICIES.get(form)
    assert factory.validate(cfg) == []
    request = PolicyRequest(
        env=env, value_dim=value_dim, device="cpu", seed=seed, trainable=trainable, gradient_checkpointing=recompute
    )
    policy = factory.build(cfg, request)
    assert isinstance(policy, FlowPolicy)
    policy.costs = factory.costs(cfg, env, value_dim)
    return policy


def observe(count, seed=0):
    rng = np.random.default_rng(seed)
    return Observation(
        images=rng.integers(0, 256, (count, 2, 20, 28, 3), np.uint8),
        state=rng.uniform(-0.8, 1.0, (count, 5)).astype(np.float32),
        instructions=tuple(ENV.tasks[i % 2] for i in range(count)),
    )


def part_of(obs, rows):
    return Observation(images=obs.images[rows], state=obs.state[rows], instructions=obs.instructions[rows])


def noise_for(policy, count):
    return np.random.default_rng(5).random((count, policy.spec.tokens_per_chunk), np.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_vla_sampled_and_recomputed_log_probs_agree(form, way, tmp_path):
    values = {"value_dim": 1, "value_from": "expert" if way == "all" else "prefix"}
    policy = build(form, folder_of(form, tmp_path), **values, **WAYS[way])
    obs = observe(5)
    noise = noise_for(policy, 5)
    out = policy.act(obs, noise=noise)
    assert out.actions.shape == (5, 3, 7)
    scores = policy.score(obs, out.tokens)
    assert np.abs(scores.logprob.detach().numpy() - out.logprob).max() < 1e-5
    assert np.abs(scores.value.detach().numpy() - out.value).max() < 1e-5
    rows = slice(1, 3)
    apart = policy.score(part_of(obs, rows), out.tokens[rows]).logprob.detach().numpy()
    assert np.abs(apart - out.logprob[rows]).max() < 1e-5
    assert np.abs(policy.act(part_of(obs, rows), noise=noise[rows]).actions - out.actions[rows]).max() < 1e-5
    assert policy.costs.num_parameters == sum(p.numel() for p in policy.module.network.parameters())


@pytest.mark.parametrize("way", ["sde", "all", "noise"])
@pytest.mark.parametrize("form", FORMS)
def test_constant_dimensions_have_no_logprob(form, way, tmp_path):
    """Neither in acting nor in scoring, and without entropy; no empty columns remain, which would enter means."""
    folder = folder_of(form, tmp_path)
    obs = observe(2)
    before = (policy := build(form, folder, **WAYS[way])).act(obs, noise=noise_for(policy, 2)).logprob
    (file,) = folder.rglob("norm_stats.json")
    stats = json.loads(file.read_text())
    for name, value in (("std", 0.0), ("q01", 0.3), ("q99", 0.3), ("mean", 0.3)):
        stats["norm_stats"]["actions"][name][2] = stats["norm_stats"]["actions"][name][5] = value
    file.write_text(json.dumps(stats))
    policy = build(form, folder, **WAYS[way])
    assert policy.spec.scored == 5
    out = policy.act(obs, noise=noise_for(policy, 2))
    scores = policy.score(obs, out.tokens)
    assert np.array_equal(out.logprob.reshape(2, 3, -1)[..., :5], before.reshape(2, 3, -1)[..., [0, 1, 3, 4, 6]])
    for numbers in (out.logprob, scores.logprob.detach().numpy(), scores.entropy.detach().numpy()):
        per_number = numbers.reshape(2, 3, -1)
        assert (per_number[..., :5] != 0).all()
        assert not per_number[..., 5:].any()


@pytest.mark.parametrize("form", FORMS)
def test_greedy_chunks_match_published_preprocessing_and_euler_steps(form, tmp_path):
    """Rotated, padded images with a black, masked third camera; statistics; prompt; Euler steps."""
    policy, obs = build(form, folder_of(form, tmp_path)), observe(3)
    fit = pad_left_top if form == "smolvla" else pad_centered
    flipped = np.ascontiguousarray(obs.images[:, :, ::-1, ::-1])
    images = torch.stack([fit(flipped[:, c], 28) for c in (0, 1)] + [torch.full((3, 3, 28, 28), -1.0)], 1)
    if form == "pi05":
        state = (obs.state + 0.9) / (2.0 + 1e-6) * 2.0 - 1.0
        bins = np.digitize(state, np.linspace(-1, 1, 257)[:-1]) - 1
        rows = zip(obs.instructions, bins, strict=True)
        texts = [["<bos>", *f"Task: {t}, State: {' '.join(map(str, row))};\nAction: "] for t, row in rows]
    else:
        state = (obs.state - 0.1) / (0.5 + 1e-6)
        texts = [[*(["<bos>"] if form == "pi0" else []), *text, "\n"] for text in obs.instructions]
    vocabulary = json.loads((tmp_path / form / "tokenizer.json").read_text())["model"]["vocab"]
    longest = max(map(len, texts)) + 3
    ids = torch.tensor([[vocabulary.get(c, 1) for c in text] + [0] * (longest - len(text)) for text in texts])
    inputs = FlowInputs(
        images=images,
        image_mask=torch.tensor([[True, True, False]]).expand(3, -1),
        tokens=ids,
        token_mask=torch.arange(longest) < torch.tensor([[len(text)] for text in texts]),
        state=torch.nn.functional.pad(torch.from_numpy(state).float(), (0, 7)),
    )
    model = build_model(form)
    start = policy._get_greedy_start(obs)
    with torch.no_grad():
        x = sample(model, model.prefix(inputs), start, 4)[:, :3, :7].numpy()
    expected = (x + 1) / 2 * (2.0 + 1e-6) - 0.9 if form == "pi05" else x * (0.5 + 1e-6) + 0.1
    # The time embedding turns by 2e-4 for the last bit of a time, which the steps add up in another order.
    np.testing.assert_allclose(policy.act(obs, noise=None).actions, expected, atol=2e-4)


def test_relative_actions_round_trip(tmp_path):
    """openpi's pi0_libero: the first dimensions are relative to the state."""
    path, obs = folder_of("pi0", tmp_path), observe(3)
    absolute, relative = build("pi0", path), build("pi0", path, delta_dims=4)
    moved = absolute.act(obs, noise=None).actions
    moved[..., :4] += obs.state[:, None, :4]
    np.testing.assert_allclose(relative.act(obs, noise=None).actions, moved, atol=1e-5)
    given = np.random.default_rng(1).normal(size=(3, 6, 7)).astype(np.float32)
    rows = relative._scale.from_actions(given, obs)
    assert rows.shape == (3, 6, 12)
    assert not rows[..., 7:].any()
    np.testing.assert_allclose(relative._scale.to_actions(rows, obs), given, atol=1e-5)


def test_pi05_without_state_uses_the_pi0_prompt(tmp_path):
    policy = build("pi05", folder_of("pi05", tmp_path), state_in_prompt=False)
    assert not policy.spec.inputs.state
    obs = observe(2)
    moved = replace(obs, state=obs.state + 5.0)
    reader = policy.module.network.processor
    assert torch.equal(reader.encode(obs).tokens, reader.encode(moved).tokens)
    assert reader.encode(obs).tokens.shape[1] == 2 + len(ENV.tasks[0])


@pytest.mark.parametrize("told", [True, False])
def test_pi05_accepts_states_of_any_length(told, tmp_path):
    """Twelve dimensions are more than a state token supports; pi0.5 has no state token."""
    wide, obs = replace(ENV, state_dim=15), observe(2)
    obs = replace(obs, state=np.tile(obs.state, 3))
    path = write_checkpoint(tmp_path / "pi05", "pi05", state_dim=15, action_dim=7)
    policy = build("pi05", path, env=wide, state_in_prompt=told)
    assert policy.act(obs, noise=None).actions.shape == (2, 3, 7)
    changed = policy.module.network.processor.encode(replace(obs, state=-obs.state)).tokens
    assert torch.equal(policy.module.network.processor.encode(obs).tokens, changed) is not told


def test_relative_actions_use_the_state(tmp_path):
    """Otherwise a server would not request the state that relative actions need."""
    assert build("pi05", folder_of("pi05", tmp_path), state_in_prompt=False, delta_dims=5).spec.inputs.state


@pytest.mark.parametrize("form", FORMS)
def test_imitation_loss_covers_the_whole_chunk(form, tmp_path):
    """All six rows, although three are executed; padded dimensions count, as in the public training."""
    path, obs = folder_of(form, tmp_path), observe(4)
    policy = build(form, path)
    assert (policy.spec.imitated, policy.spec.num_action_chunks) == (6, 3)
    actions = np.random.default_rng(2).uniform(-1, 1, (4, 6, 7)).astype(np.float32)
    network = policy.module.network
    with torch.no_grad():
        found = policy.imitate(obs, actions)
        noise = sample_normals(np.arange(4), START, (6, 12), torch.device("cpu"))
        t = torch.from_numpy(0.001 + 0.999 * sample_uniforms(np.arange(4), TIMES, 1)[:, 0] ** (2 / 3)).float()
        target = torch.from_numpy(network.processor.from_actions(actions, obs))
        prefix = network.model.prefix(network.processor.encode(obs))
        at = t[:, None, None]
        v = network.model.denoise(network.model.memory(prefix), at * noise + (1 - at) * target, t).velocity
        loss = (v - (noise - target)).square().flatten(1).mean(1)
    torch.testing.assert_close(found.loss, loss, rtol=1e-4, atol=1e-5)
    # Of the seven numbers of an action: padding, which stays where it is, would count as right.
    with torch.no_grad():
        velocity = partial(network.velocity, network.encode_prefix(obs))
        flowed = integrate_ode(velocity, policy._get_greedy_start(obs), policy._cfg.num_steps)
    right = ((flowed - target).abs() < 0.1)[..., :7].float().mean((1, 2))
    torch.testing.assert_close(found.accuracy, right)
    assert not torch.allclose(right, ((flowed - target).abs() < 0.1).float().mean((1, 2)), atol=1e-3)
    assert policy.imitate(obs, actions).loss.requires_grad
    torch.manual_seed(1)
    one, other = (policy.imitate(obs, actions).loss for _ in range(2))
    torch.manual_seed(1)
    both = build(form, path, imitated_pairs=2).imitate(obs, actions).loss
    torch.testing.assert_close(both, (one + other) / 2)


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("pi0", OPENPI),
        ("pi0", LEROBOT),
        ("pi0", TRANSFORMERS),
        ("pi05", OPENPI),
        ("pi05", LEROBOT),
        ("smolvla", SMOLVLA_LEROBOT),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_published_checkpoint_folders_round_trip(form, layout, tmp_path):
    """Read, saved and read again: the same names, weights, side files and actions."""
    lerobot = layout in (LEROBOT, SMOLVLA_LEROBOT)
    path = folder_of(form, tmp_path, layout=layout, lerobot_statistics=lerobot)
    policy = build(form, path, value_dim=1)
    policy.save(tmp_path / "saved")
    before, after = (load_file(p / "model.safetensors") for p in (path, tmp_path / "saved"))
    assert {k for k in after if "value_head" not in k} == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    again = build(form, tmp_path / "saved", value_dim=1, seed=9)
    obs = observe(3)
    for noise in (None, noise_for(policy, 3)):
        one, other = policy.act(obs, noise=noise), again.act(obs, noise=noise)
        assert np.array_equal(one.actions, other.actions)
        assert np.array_equal(one.value, other.value)
    bare = build(form, tmp_path / "saved")
    assert np.array_equal(bare.act(obs, noise=None).actions, policy.act(obs, noise=None).actions)


def trained_parts(policy):
    names = {n.removeprefix("network.model.") for n, p in policy.module.named_parameters() if p.requires_grad}
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("form", FORMS)
def test_trained_parameters_follow_the_settings(form, tmp_path):
    path = folder_of(form, tmp_path)
    obs = observe(3)
    heads = {n.partition(".")[0] for n in build_model(form).state_dict()} - {*BACKBONE, "expert"}
    expert = build(form, path)
    assert trained_parts(expert) == heads | {"expert"}
    assert trained_parts(build(form, path, train_expert_only=False)) == heads | {"expert", *BACKBONE}
    out = expert.act(obs, noise=noise_for(expert, 3))
    expert.score(obs, out.tokens).logprob.sum().backward()
    grads = {n: p.grad for n, p in expert.module.named_parameters() if p.requires_grad}
    assert all(grad is not None and grad.any() for grad in grads.values())


@pytest.mark.parametrize("form", FORMS)
def test_vla_residual_starts_at_zero_with_a_frozen_base(form, tmp_path):
    path, obs = folder_of(form, tmp_path), observe(4)
    alone, policy = build(form, path), build(form, path, likelihood="residual", residual_scale=0.4)
    assert trained_parts(policy) == {"residual_actor"}
    assert np.array_equal(*(p.act(obs, noise=None).actions for p in (alone, policy)))
    torch.nn.init.normal_(policy.module.residual_actor.layers[-1].weight, std=0.1)
    out = policy.act(obs, noise=noise_for(policy, 4))
    proposed, chosen = policy.features(obs)[:, -21:], policy.tokens_to_chunks(out.tokens)
    rows = (proposed + 0.4 * chosen).detach().numpy().reshape(4, 3, 7)
    np.testing.assert_allclose(policy._scale.to_actions(rows, obs), out.actions, atol=1e-5)
    policy.save(tmp_path / "saved")
    again = build(form, tmp_path / "saved", likelihood="residual", residual_scale=0.4, seed=9)
    assert np.array_equal(*(p.act(obs, noise=None).actions for p in (policy, again)))
    flow = build(form, tmp_path / "saved")
    assert "trained with model.likelihood=residual" in flow.spec.warnings[-1]
    assert np.array_equal(*(p.act(obs, noise=None).actions for p in (alone, flow)))
    flow.save(tmp_path / "flow")
    assert not (tmp_path / "flow" / "steering.json").exists(), "the saved flow has no actor"


@pytest.mark.parametrize("form", FORMS)
def test_vla_gradient_checkpointing_keeps_gradients(form, tmp_path):
    path, found = folder_of(form, tmp_path), []
    for recompute in (False, True):
        policy = build(form, path, train_expert_only=False, recompute=recompute)
        obs = observe(3)
        out = policy.act(obs, noise=noise_for(policy, 3))
        policy.score(obs, out.tokens).logprob.sum().backward()
        found.append({n: p.grad for n, p in policy.module.named_parameters()})
    for name, grad in found[0].items():
        if grad is not None:
            torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("only", [True, False], ids=["expert", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_adapters_are_trained_saved_and_merged(form, only, tmp_path):
    path, obs = folder_of(form, tmp_path), observe(3)
    keys = {"is_lora": True, "lora": {"r": 2, "lora_alpha": 4}, "train_expert_only": only}
    policy = build(form, path, value_dim=1, **keys)
    plain = build(form, path).act(obs, noise=None).actions
    np.testing.assert_allclose(policy.act(obs, noise=None).actions, plain, atol=1e-6)
    adapted = {n for n, p in policy.module.named_parameters() if ".lora_" in n and p.requires_grad}
    assert adapted
    assert all(".expert." in n for n in adapted) == only
    for name, parameter in policy.module.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    saved = tmp_path / "saved"
    saved.mkdir()
    policy.save(saved)
    assert not any(saved.glob("model*.safetensors"))
    moved = policy.act(obs, noise=None)
    assert np.abs(moved.actions - plain).max() > 1e-3
    resumed = build(form, path, value_dim=1, seed=8, **keys)
    resumed.load_weights(saved)
    assert np.array_equal(resumed.act(obs, noise=None).actions, moved.actions)
    assert np.array_equal(resumed.act(obs, noise=None).value, moved.value)
    export_policy(settings(form, path, **keys), ENV, saved, tmp_path / "whole")
    merged = build(form, tmp_path / "whole").act(obs, noise=None).actions
    np.testing.assert_allclose(merged, moved.actions, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_keeps_trained_weights_in_float32(form, tmp_path):
    path, obs = folder_of(form, tmp_path), observe(3)
    exact = build(form, path).act(obs, noise=None).actions
    for trainable in (False, True):
        policy = build(form, path, precision="bf16", trainable=trainable)
        kinds = {p.dtype for p in policy.module.parameters() if p.requires_grad or not trainable}
        assert kinds == {torch.float32 if trainable else torch.bfloat16}
        assert np.abs(policy.act(obs, noise=None).actions - exact).max() < 0.1


def test_random_initialization_needs_no_statistics(tmp_path):
    path = folder_of("pi0", tmp_path, random=True)
    shutil.rmtree(path / "assets")
    policy = build("pi0", path)
    policy.save(tmp_path / "saved")
    assert "embodyrl_init" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert np.isfinite(policy.act(observe(2), noise=None).actions).all()
    with pytest.raises(CheckpointError, match="no statistics of states and actions"):
        build("pi0", tmp_path / "saved")


@pytest.mark.parametrize(
    ("keys", "change", "match"),
    [
        ({"num_action_chunks": 7}, None, "predicts 6 actions per chunk"),
        ({"delta_dims": 6}, None, r"or states \(5\)"),
        ({}, lambda path: shutil.rmtree(path / "assets"), "no statistics of states and actions"),
        ({}, lambda path: shutil.copytree(path / "assets/lab", path / "assets/second"), "statistics of 2 data sets"),
        (
            {"delta_dims": 2},
            lambda path: (path / "dataset_statistics.json").write_text("{}"),
            "dataset_statistics.json",
        ),
    ],
    ids=["chunk", "delta", "statistics", "two", "own"],
)
def test_mismatched_environment_is_rejected(keys, change, match, tmp_path):
    path = folder_of("pi0", tmp_path)
    if change:
        change(path)
    with pytest.raises((ConfigError, CheckpointError), match=match):
        build("pi0", path, **keys)


def test_statistics_with_too_few_dimensions_are_rejected(tmp_path):
    path = write_checkpoint(tmp_path / "pi0", "pi0", state_dim=4, action_dim=7)
    with pytest.raises(CheckpointError, match="has 4 dimensions, but the environment has 5"):
        build("pi0", path)


def test_validate_reports_missing_files(tmp_path):
    path = folder_of("pi0", tmp_path)
    factory = POLICIES.get("pi0")
    assert "set model=pi0" in POLICIES.get("pi05").validate(settings("pi05", path))[0]
    (path / "tokenizer.json").unlink()
    assert "PaliGemma" in factory.validate(settings("pi0", path))[0]
    (path / "model.safetensors").unlink()
    assert any("no model*.safetensors" in line for line in factory.validate(settings("pi0", path)))
    assert "is not a folder" in factory.validate(settings("pi0", tmp_path / "none"))[0]


LIBERO = replace(
    ENV,
    name="libero_spatial",
    cameras=replace(ENV.cameras, names=("agentview", "robot0_eye_in_hand"), size=(256, 256)),
    state_dim=8,
)


@pytest.mark.parametrize(
    ("preset", "executed", "horizon", "state", "tokens"),
    [
        # One step's index; the state before it, H x 12; what is executed of the one after it; two floats to a token.
        ("pi0_libero", 5, 50, True, 1 + (50 * 12 + 5 * 7 + 1) // 2),
        ("pi05_libero", 5, 10, False, 1 + (10 * 12 + 5 * 7 + 1) // 2),
        ("smolvla_libero", 10, 50, True, 1 + (50 * 12 + 10 * 7) // 2),
    ],
)
def test_libero_presets_are_valid(preset, executed, horizon, state, tokens, tmp_path):
    form = preset.removesuffix("_libero")
    path = write_checkpoint(tmp_path / form, form, state_dim=8, action_dim=7)
    length = () if form == "pi05" else (f"model.horizon={horizon}",)
    cfg = load_config("eval", ["env=libero_spatial", f"model={preset}", f"model.path={path}", *length]).model
    spec = POLICIES.get(cfg.model_type).spec(cfg, LIBERO, 0)
    assert mismatches(LIBERO, spec) == []
    assert (spec.name, spec.inputs.num_images, spec.num_action_chunks, spec.imitated) == (form, 2, executed, horizon)
    assert (spec.inputs.state, cfg.num_steps, cfg.delta_dims) == (state, 10, 6 if form == "pi0" else 0)
    assert cfg.greedy_start == "random"
    assert spec.tokens_per_chunk == -(-tokens // executed) * executed


@pytest.mark.parametrize("name", ["pi05_tiny", "smolvla_tiny"])
def test_tiny_vlas_act_on_the_tabletop(name):
    cfg = load_config("sft", [f"model={name}", "data.path=none"]).model
    factory = POLICIES.get(cfg.model_type)
    assert factory.validate(cfg) == []
    env = replace(
        ENV,
        cameras=replace(ENV.cameras, size=(56, 56), rotation_deg=0),
        state_dim=4,
        tasks=("touch the red block",) * 2,
    )
    policy = factory.build(cfg, PolicyRequest(env=env, device="cpu", seed=0, trainable=True))
    count = factory.costs(cfg, env, 0).num_parameters
    assert count == sum(p.numel() for p in policy.module.parameters()) < 3e6
    obs = Observation(
        images=np.zeros((2, 1, 56, 56, 3), np.uint8), state=np.zeros((2, 4), np.float32), instructions=env.tasks
    )
    assert policy.act(obs, noise=None).actions.shape == (2, 4, 7)
    assert policy.imitate(obs, np.zeros((2, 4, 7), np.float32)).loss.requires_grad


@pytest.mark.parametrize("form", FORMS)
def test_costs_count_the_trained_parameters(form, tmp_path):
    lora = {"is_lora": True, "train_expert_only": True}
    policy = build(form, folder_of(form, tmp_path), **lora)
    trained = sum(p.numel() for p in policy.module.parameters() if p.requires_grad)
    assert policy.costs.num_trained == trained


def measure_activations(policy, count=4):
    """Return the bytes per sample that scoring a batch stores for the backward pass, without parameters."""
    out = policy.act(observe(count), noise=noise_for(policy, count))
    parameters = {p.untyped_storage().data_ptr() for p in policy.module.parameters()}
    stored = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            stored[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.score(observe(count), out.tokens)
    return sum(size for size, _ in stored.values()) / count


@pytest.mark.parametrize("way", ["all", "noise", "fpo"])
@pytest.mark.parametrize("form", FORMS)
def test_planned_activations_include_all_passes_of_the_expert(form, way, tmp_path):
    one, several = (
        build(form, folder_of(form, tmp_path / name), num_images_in_input=2, **keys)
        for name, keys in (("one", {}), ("several", WAYS[way]))
    )
    planned = several.costs.activation_bytes - one.costs.activation_bytes
    measured = measure_activations(several) - measure_activations(one)
    assert measured < planned < 2 * measured, "the plan assumes longer prompts"


@pytest.mark.parametrize("name", ["pi05_tiny", "smolvla_tiny"])
def test_included_tiny_vlas_are_small_and_tokenize_tasks(name):
    cfg = load_config("eval", [f"model={name}"]).model
    folder = resolve_asset(str(cfg.path))
    assert sum(path.stat().st_size for path in folder.iterdir()) < 6e6
    env = replace(
        ENV,
        cameras=replace(ENV.cameras, size=(56, 56), rotation_deg=0),
        state_dim=4,
        benchmark=BenchmarkSpec(unnorm_key="tabletop"),
    )
    policy = POLICIES.get(cfg.model_type).build(cfg, PolicyRequest(env=env, device="cpu", seed=0))
    images = np.full((2, 1, 56, 56, 3), 180, np.uint8)
    images[:, :, 20:26, 8:14], images[:, :, 20:26, 42:48] = (220, 40, 40), (50, 110, 240)
    asked = "touch the red block", "touch the blue block"
    obs = Observation(images=images, state=np.zeros((2, 4), np.float32), instructions=asked)
    red, blue = policy.act(obs, noise=None).actions[..., :3]
    assert np.abs(red - blue).max() > 0.1
    # On the table only x, y and z are anybody's choice: rotations and fingers are constant in the demonstrations.
    noise = np.random.default_rng(0).random((2, policy.spec.tokens_per_chunk), np.float32)
    chosen = policy.act(obs, noise=noise)
    by_number = chosen.logprob.reshape(2, 4, -1)[..., :7] != 0
    assert by_number.tolist() == np.broadcast_to([1, 1, 1, 0, 0, 0, 0], (2, 4, 7)).tolist()
    np.testing.assert_allclose(policy.score(obs, chosen.tokens).logprob.detach().numpy(), chosen.logprob, atol=1e-5)
