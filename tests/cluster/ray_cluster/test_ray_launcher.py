"""Ray actors on two nodes: results match one process, and lost nodes are tolerated."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from gates import gain, learn, train_gate
from light_worker import Word
from processes import listening, marked_processes, start_cli, wait_until
from toy_runs import comparable, rows, toy_config, toy_words, train_toy, weights

from embodyrl.channels.arena import Arena
from embodyrl.channels.messages import RankInfo
from embodyrl.checkpoint.store import CheckpointStore
from embodyrl.cluster.protocol import ClusterSettings, WorkerDied
from embodyrl.plan.build import build_run_plan
from embodyrl.scheduler.start import build_env_spec, build_policy_specs
from embodyrl.types import SimulatorSpec
from embodyrl.workers.lifecycle import WorkerInit, WorkerSpec

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
WORDS = ("runner.deterministic=true", "env.kwargs.goal=0.7", "actor.optim.lr=0.001", "runner.max_steps=2")
APART = ("launcher.name=ray", "cluster.num_nodes=2", "cluster.component_placement={env:1,rollout:0,actor:0}")


@pytest.fixture
def two_nodes(monkeypatch):
    from ray.cluster_utils import Cluster

    # Ray gives its workers the lowest priority: on a busy machine they would hardly run.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    second = cluster.add_node(num_cpus=4)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def test_two_ray_nodes_match_one_process(tmp_path, two_nodes):
    alone = train_toy(tmp_path, *WORDS, name="alone")
    apart = train_toy(tmp_path, *WORDS, *APART, "launcher.env_workers=2", name="apart")
    assert comparable(apart) == comparable(alone)
    assert weights(apart, 2) == weights(alone, 2)
    assert {p.name for p in (apart / "logs" / "attempt_1").glob("*.log")} <= {
        "policy.log",
        "env_0.log",
        "env_1.log",
        "events.log",
    }


@pytest.mark.parametrize("algorithm", ["algorithm=grpo", "algorithm=ppo"])
def test_actor_ranks_on_two_nodes_match_one_rank(tmp_path, two_nodes, algorithm):
    words = (*WORDS, algorithm, "algorithm.group_size=2", "runner.max_steps=1", "env.train.total_num_envs=8")
    spread = ("launcher.name=ray", "cluster.num_nodes=2", "actor.fsdp.size=2", "launcher.env_workers=1")
    alone, apart = (train_toy(tmp_path, *words, *more, name=f"run{len(more)}") for more in ((), spread))
    one, two = rows(alone)[0], rows(apart)[0]
    assert two["actor/optimizer_steps"] == one["actor/optimizer_steps"] > 0
    for name in ("actor/loss", "actor/grad_norm", "actor/kl", "train/return"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


def test_weights_are_sent_between_nodes(tmp_path, two_nodes):
    words = (*WORDS, "model.precision=fp32", "rollout.mode=disaggregated")
    alone = train_toy(tmp_path, *words, name="alone")
    spread = (*APART, "cluster.component_placement={env:0,rollout:1,actor:0}", "launcher.env_workers=1")
    apart = train_toy(tmp_path, *words, *spread, name="apart")
    assert comparable(apart) == comparable(alone)
    assert weights(apart, 2) == weights(alone, 2)


def test_run_continues_after_losing_an_env_node(tmp_path, two_nodes):
    cluster, second = two_nodes
    gate = tmp_path / "gate"

    def pull_the_plug():
        assert wait_until(gate.exists, 200)
        cluster.remove_node(second, allow_graceful=False)  # the worker waits at the gate and dies there

    killer = threading.Thread(target=pull_the_plug)
    killer.start()
    hold = (f"env.kwargs.once={gate}", "env.kwargs.fault=gate", "env.kwargs.at=5", "launcher.env_workers=1")
    run = train_toy(tmp_path, *WORDS, *APART, *hold)
    killer.join()
    logged = rows(run)
    assert [row["step"] for row in logged] == [1, 2]
    assert logged[-1]["env/restarts"] == 1
    assert logged[0]["env/dropped_episodes"] == 0


def test_output_of_a_crashed_worker_is_kept(tmp_path, two_nodes):
    from embodyrl.cluster.ray_cluster.launcher import RayLauncher

    assert RayLauncher.describe_hosts(ClusterSettings(num_nodes=2)).count(f"{socket.gethostname()} (") == 2
    named = dict.fromkeys(("rollout", "actor"), 0) | {"env": f"{socket.gethostname()},1"}
    launcher = RayLauncher(tmp_path, ClusterSettings(num_nodes=2, component_placement=named))
    assert launcher.where.count(f"{socket.gethostname()} (") == 2
    arena = Arena.create(build_run_plan(toy_config(tmp_path), training=True).layout, 1)
    init = WorkerInit(arena=arena.handle)
    for number in range(2):
        spec = WorkerSpec(name=f"env_{number}", entry="light_worker:LightWorker", init=init, component="env")
        launcher.start(spec, timeout_s=200)
        launcher.send(spec.name, Word("abort"), timeout_s=200)
    deaths: dict[str, WorkerDied] = {}

    def both_died() -> bool:
        news = {event.worker: event.message for event in launcher.wait(1.0)}
        deaths.update({name: message for name, message in news.items() if isinstance(message, WorkerDied)})
        return len(deaths) == 2

    assert wait_until(both_died, 200)
    launcher.stop()
    arena.close()
    for name, died in deaths.items():
        reason, _, path = died.reason.partition("; its output on that host: ")
        assert reason.startswith(f"died on {socket.gethostname()} (")
        assert Path(path).name.endswith(f"-{name}.log")
        assert "Fatal Python error: Aborted" in Path(path).read_text()
    assert "Fatal Python error: Aborted" in Path(deaths["env_0"].log).read_text(), "fetched on the driver's host"


def test_ray_messages_are_written_to_a_log_file(tmp_path, capsys):
    from embodyrl.cluster.ray_cluster.nodes import RayOutputRedirect

    messages = RayOutputRedirect(tmp_path / "ray.log")
    for name in ("ray_listen_error_messages", "other"):
        thread = threading.Thread(target=print, args=(f"from {name}",), name=name)
        thread.start()
        thread.join()
    messages.ending = True
    sys.stdout.write("repeated\n")
    messages.close()
    sys.stdout.write("after\n")
    assert capsys.readouterr().out == "from other\nafter\n"
    assert (tmp_path / "ray.log").read_text() == "from ray_listen_error_messages\nrepeated\n"


def test_run_starts_a_local_cluster_and_tolerates_a_head_failure(tmp_path):
    """Loopback interface, a token and one line of output; without the head node the run saves a checkpoint."""
    gate = tmp_path / "gate"
    held = (f"env.kwargs.once={gate}", "env.kwargs.fault=gate", "env.kwargs.at=5", "launcher.env_workers=1")
    session = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")  # names of sockets must be short
    environ = {"RAY_ADDRESS": "", "RAY_worker_niceness": "0", "RAY_TMPDIR": session.name}
    command = start_cli("train", *toy_words(tmp_path, *WORDS, *held, "launcher.name=ray"), cwd=tmp_path, env=environ)
    try:
        command.wait_for(gate, deadline_s=300)
        started = [int(line.split()[0]) for line in marked_processes()]
        assert {address.removeprefix("::ffff:") for address in listening(started)} == {"127.0.0.1"}
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in started}
        head = next(pid for pid, name in names.items() if name == "gcs_server")
        assert b"RAY_AUTH_MODE=token" in Path(f"/proc/{head}/environ").read_bytes()
        assert f"node 0 {socket.gethostname()} (127.0.0.1)" in command.printed
        os.kill(head, signal.SIGKILL)
        assert command.wait(200) == 4, command.printed
    finally:
        command.stop()
        session.cleanup()
    assert "the Ray head at 127.0.0.1:" in command.printed
    assert command.printed.rstrip().endswith(f" embodyrl train --resume {tmp_path}/run trust=true")
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.verify(store.path(store.steps()[-1]))
    assert wait_until(lambda: not marked_processes(), 60), "agents of a node look for it every few seconds"


def test_worker_that_dies_unnoticed_by_its_node_is_restarted_on_the_only_host(tmp_path):
    """Ray reports such a worker as unavailable, as those of a lost host."""
    gate = tmp_path / "gate"
    held = (f"env.kwargs.once={gate}", "env.kwargs.fault=gate", "env.kwargs.at=5", "launcher.env_workers=1")
    session = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")  # names of sockets must be short
    environ = {"RAY_ADDRESS": "", "RAY_worker_niceness": "0", "RAY_TMPDIR": session.name}
    command = start_cli("train", *toy_words(tmp_path, *WORDS, *held, "launcher.name=ray"), cwd=tmp_path, env=environ)
    try:
        command.wait_for(gate, deadline_s=300)
        started = [int(line.split()[0]) for line in marked_processes()]
        raylet = next(pid for pid in started if Path(f"/proc/{pid}/comm").read_text() == "raylet\n")
        (env,) = (pid for pid in started if os.readlink(f"/proc/{pid}/fd/1").endswith("-env_0.log"))
        os.kill(raylet, signal.SIGSTOP)
        os.kill(env, signal.SIGKILL)
        assert wait_until(lambda: "worker env_0 died on" in " ".join(command.printed.split()), 60), command.printed
        os.kill(raylet, signal.SIGCONT)
        gate.with_name("gate.open").touch()
        assert command.wait(200) == 0, command.printed
    finally:
        command.stop()
        session.cleanup()
    assert wait_until(lambda: not marked_processes(), 90), "agents wait for a head that is gone"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_the_start_of_a_local_cluster_leaves_no_process(tmp_path, signum):
    session = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")  # names of sockets must be short
    environ = {"RAY_ADDRESS": "", "RAY_TMPDIR": session.name}
    command = start_cli("train", *toy_words(tmp_path, "launcher.name=ray"), cwd=tmp_path, env=environ)
    try:
        assert wait_until(lambda: any("raylet/raylet" in line for line in marked_processes()), 100), command.printed
        command.signal_group(signum)
        assert command.wait(100) == 128 + signum, command.printed
        assert wait_until(lambda: not marked_processes(), 20), marked_processes()
        assert f" embodyrl train --resume {tmp_path}/run" in command.printed
        assert "Traceback" not in command.printed
    finally:
        command.stop()
        session.cleanup()


def test_nodes_are_numbered_by_address():
    from embodyrl.cluster.ray_cluster.nodes import Node, sort_nodes

    nodes = [Node(f"id{n}", address, f"h{n}") for n, address in enumerate(("10.0.0.9", "10.0.0.10", "10.0.0.2", "::1"))]
    assert [node.id for node in sort_nodes(nodes, "id1")] == ["id1", "id2", "id0", "id3"]


def test_rejoined_host_keeps_its_number():
    from embodyrl.cluster.ray_cluster.nodes import Node, select_usable_nodes

    nodes = [Node(f"id{n}", f"10.0.0.{n}", f"h{n}") for n in range(3)]
    returned, stranger = Node("id7", "10.0.0.1", "h1"), Node("id8", "10.0.0.8", "h8")
    assert select_usable_nodes(nodes, nodes) == dict(enumerate(nodes))
    assert select_usable_nodes(nodes, [stranger, nodes[2], nodes[0]]) == {0: nodes[0], 2: nodes[2]}
    assert select_usable_nodes(nodes, [stranger, nodes[0], returned]) == {0: nodes[0], 1: returned}
    one_host = [Node("a", "127.0.0.1", "h"), Node("b", "127.0.0.1", "h")]
    assert select_usable_nodes(one_host, one_host[:1]) == {0: one_host[0]}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_text_task_is_learned_on_two_nodes(tmp_path, two_nodes):
    before, after = gain(learn(tmp_path, "length", *APART, "launcher.env_workers=2"))
    assert before < 0.1
    assert after >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_default_run_improves_on_two_nodes(tmp_path, two_nodes):
    few = ("runner.max_steps=5", "runner.val_check_interval=5", "runner.deterministic=true", "seed=1", "video=none")
    before, after = gain(train_gate(tmp_path, *few, *APART, "launcher.env_workers=2"))
    assert after >= before + 0.25


def test_each_ray_actor_gets_its_own_gpu(tmp_path, monkeypatch):
    """Two nodes with two GPUs each, by name only."""
    from ray.cluster_utils import Cluster

    from embodyrl.cluster.ray_cluster.launcher import RayLauncher

    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    words = ("launcher.name=ray", "cluster.num_nodes=2", "cluster.component_placement={env:0-1,rollout:0,actor:0}")
    cfg = toy_config(tmp_path, *words, "actor.fsdp.size=2", "launcher.env_workers=4")
    run_plan = build_run_plan(cfg, training=True)
    blind = replace(run_plan, env=replace(run_plan.env, simulator=SimulatorSpec(on_gpu=False)))
    arena = Arena.create(run_plan.layout, 1)
    specs = build_policy_specs(run_plan, arena, None, bucket_arena=None, rank_info=RankInfo())
    specs += [build_env_spec(run_plan, arena, number) for number in range(4)]
    specs.append(replace(build_env_spec(blind, arena, 0), name="env_4"))
    head = {"num_cpus": 4, "num_gpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=4, num_gpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        launcher, seen = RayLauncher(tmp_path, cfg.cluster), {}
        for spec in specs:
            launcher.start(replace(spec, entry="light_worker:LightWorker"), timeout_s=200)
            launcher.send(spec.name, Word("gpus"), timeout_s=200)

        def told() -> bool:
            seen.update({event.worker: event.message for event in launcher.wait(1.0) if event.message != "ready"})
            return len(seen) == len(specs)

        assert wait_until(told, 200), seen
        launcher.stop()
    finally:
        ray.shutdown()
        cluster.shutdown()
        arena.close()
    assert {seen.pop("policy"), seen.pop("policy_1")} == {"4", "6"}, "Ray chose"
    assert seen == {"env_0": "4", "env_1": "4", "env_2": "6", "env_3": "6", "env_4": ""}
