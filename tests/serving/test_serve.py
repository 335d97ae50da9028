"""`embodyrl serve` and model=remote: real processes, both protocols, and third-party clients if installed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import MARK, TESTS, listening, start_cli
from toy_runs import TOY_OFT, toy_words, train_toy

from embodyrl.commands.evaluate import evaluate
from embodyrl.errors import CheckpointError, ConfigError, EmbodyError, Interrupted
from embodyrl.plan.config import load_config
from embodyrl.policies.protocol import PolicyRequest
from embodyrl.policies.remote import FACTORY
from embodyrl.policies.remote.settings import RemoteSettings, ServeSettings
from embodyrl.policies.remote.wire_formats import OPENPI, encode_openpi_array, encode_vla_eval_array, pack, unpack
from embodyrl.policies.settings import ModelSettings
from embodyrl.policies.untrained.policy import RANDOM, UntrainedPolicy
from embodyrl.serving import server
from embodyrl.serving.serve import build_specs
from embodyrl.serving.server import ObservationHandler, PolicyServer
from embodyrl.types import ActionSpec, CameraSpec, EnvSpec, GripperConvention, InputSpec, Observation

client = pytest.importorskip("websockets.sync.client", reason="the extra `serve` is not installed")
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402

pytestmark = [pytest.mark.integration]
CLIENTS = os.environ.get("EMBODYRL_TEST_CLIENTS")
"""Python of an environment with openpi-client and vla-eval, which need other versions of numpy."""
real_clients = pytest.mark.skipif(
    not CLIENTS, reason="EMBODYRL_TEST_CLIENTS names no Python with openpi-client and vla-eval"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Train a run of the toy environment."""
    return train_toy(tmp_path_factory.mktemp("trained"), *TOY_OFT)


@contextmanager
def serving(run: Path, folder: Path, *words: str) -> Iterator[str]:
    """Start a server of the run; Ctrl-C stops the server."""
    # Not of this test but of this module, which ends it.
    beyond = {MARK: "module"}
    server = start_cli("serve", str(run), "trust=true", "serve.port=0", "--json", *words, cwd=folder, env=beyond)
    try:
        server.wait_for(folder / "stdout.txt", lines=1)
        assert listening([server.pid]) == {"127.0.0.1"}
        yield json.loads(server.out.read_text())["url"]
        server.signal_group(signal.SIGINT)
        assert server.wait(20) == 128 + signal.SIGINT
        assert "Traceback" not in server.printed
        assert "stopped by SIGINT" in server.printed
    finally:
        server.stop()


@pytest.fixture(scope="module")
def openpi(run, tmp_path_factory) -> Iterator[str]:
    with serving(run, tmp_path_factory.mktemp("openpi")) as url:
        yield url


@pytest.fixture(scope="module")
def vla_eval(run, tmp_path_factory) -> Iterator[str]:
    with serving(run, tmp_path_factory.mktemp("vla_eval"), "serve.protocol=vla_eval") as url:
        yield url


def observation(seed: int = 0, size: int = 64) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"observation/image": rng.integers(0, 256, (size, size, 3), np.uint8), "prompt": "reach the target"}


def evaluated(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Return the episodes of an inline evaluation of the toy environment in order, without clock-dependent values."""
    quiet = ("launcher=inline", "runner.logger.backends=[jsonl]", "env.eval.total_num_envs=1", "eval.episodes=6")
    cfg = load_config("eval", toy_words(folder, *quiet, *words, command="eval", name="eval"))
    lines = (evaluate(cfg).folder / "episodes.jsonl").read_text().splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
    return sorted(rows, key=lambda row: row["episode"])


def test_served_checkpoint_gives_the_same_episodes(run, openpi, tmp_path):
    alone = evaluated(tmp_path / "alone", *TOY_OFT, f"ckpt={run}")
    remote = ("model=remote", f"model.url={openpi}")
    assert len(alone) == 6
    assert evaluated(tmp_path / "remote", *remote) == alone


def build(url: str, env: EnvSpec, **keys: Any) -> Any:
    cfg = RemoteSettings(model_type="remote", url=url, num_action_chunks=4, answer_timeout_s=20.0).updated(keys)
    return FACTORY.build(cfg, PolicyRequest(env=env, device="cpu", seed=0, trainable=False))


ENV = EnvSpec(
    name="somewhere",
    action=ActionSpec(dim=7, gripper=GripperConvention(open=-1.0, closed=1.0)),
    tasks=("reach the target",),
    states_per_task=(1,),
    cameras=CameraSpec(names=("front",), size=(64, 64)),
)


def test_client_rejects_a_mismatched_server(openpi):
    seen = Observation(
        images=observation()["observation/image"][None, None],
        state=np.zeros((1, 0), np.float32),
        instructions=("reach the target",),
    )
    policy = build(openpi, ENV)
    assert policy.server["action_horizon"] == 4
    assert policy.act(seen, noise=None).actions.shape == (1, 4, 7)
    with pytest.raises(EmbodyError, match=r"model\.num_action_chunks=4"):
        build(openpi, ENV, num_action_chunks=5).act(seen, noise=None)
    with pytest.raises(EmbodyError, match=r"shape \[4, 7\], expected \[n, 3\]"):
        build(
            openpi,
            EnvSpec(
                name="x",
                action=ActionSpec(dim=3),
                tasks=("a",),
                states_per_task=(1,),
                cameras=CameraSpec(names=("front",)),
            ),
        ).act(seen, noise=None)
    with pytest.raises(EmbodyError, match=r"the server reports: .*'observation/image'.*'pixels'"):
        build(openpi, ENV, image_names=["pixels"]).act(seen, noise=None)
    with pytest.raises(CheckpointError, match="its weights are on a server"):
        policy.load_weights(Path("anywhere"))
    with pytest.raises(EmbodyError, match="does not support vla-eval's protocol"):
        build(openpi, ENV, protocol="vla_eval")


def test_client_disconnects_from_a_flooding_server():
    """Messages contain no control characters of the server's text."""
    from websockets.sync.server import serve as listen

    with listen(lambda socket: socket.send(b"x" * (17 << 20)), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(EmbodyError, match="the connection was closed"):
            build(f"ws://127.0.0.1:{server.socket.getsockname()[1]}", ENV)
        server.shutdown()


def test_unreachable_server_error_contains_a_fix():
    with pytest.raises(EmbodyError, match=r"No server answered at .* Fix: start the server"):
        build("ws://127.0.0.1:9", ENV, connect_timeout_s=0.3)


def test_error_reply_keeps_the_connection_open(openpi):
    wrong = [
        (b"\xc1", "not msgpack"),
        (pack([1], encode_openpi_array), "a mapping"),
        (pack(observation() | {"prompt": 3}, encode_openpi_array), "a string"),
        (pack({"prompt": "reach"}, encode_openpi_array), "'observation/image'"),
    ]
    with client.connect(openpi, compression=None, proxy=None) as socket:
        told = unpack(socket.recv(timeout=20))
        assert told["action_dim"] == 7
        for message, says in wrong:
            socket.send(message)
            answer = socket.recv(timeout=20)
            assert isinstance(answer, str)
            assert says in answer
        socket.send(pack(observation(), encode_openpi_array))
        assert unpack(socket.recv(timeout=20))["actions"].shape == (4, 7)


def test_arbitrary_messages_do_not_stop_the_server(openpi):
    rng, valid = random.Random(0), pack(observation(size=8), encode_openpi_array)
    many = [
        b"\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20),
        b"",
        b"\x90",
        b"\x07",
        b"\xc0",
        b"\xc1",
        pack({}, encode_openpi_array),
    ]
    for _ in range(500):
        body = bytearray(valid)
        for _ in range(rng.randrange(1, 5)):
            body[rng.randrange(min(len(body), 90))] = rng.randrange(256)
        many.append(bytes(body))
    with client.connect(openpi, compression=None, proxy=None) as socket:
        socket.recv(timeout=20)
        for body in many:
            socket.send(body)
            assert socket.recv(timeout=60)
        socket.send(valid)
        assert unpack(socket.recv(timeout=20))["actions"].shape == (4, 7)


def test_clients_beyond_the_limit_are_rejected(run, tmp_path):
    with (
        serving(run, tmp_path, "serve.max_clients=1") as url,
        client.connect(url, compression=None, proxy=None) as first,
    ):
        first.recv(timeout=20)
        with pytest.raises(InvalidStatus, match="503"):
            client.connect(url, compression=None, proxy=None)
        assert "serve.max_clients" in (tmp_path / "stderr.txt").read_text()


def test_text_tasks_are_rejected():
    with pytest.raises(ConfigError, match="env_type=text: `embodyrl serve` serves only robot policies"):
        build_specs(load_config("serve", ["env=text/copy", "model=causal_lm_tiny"]))


@pytest.mark.parametrize(
    "names", [(), ("serve.image_names=[a,b]",), ("serve.image_names=[a]", "serve.protocol=vla_eval")]
)
def test_policies_with_more_images_than_keys_are_rejected(names):
    cameras = ("env.init_params.camera_names=[front,wrist,side]", "model.num_images_in_input=3")
    words = ["env=tabletop", "model=flow_small", "model.path=null", *cameras]
    with pytest.raises(ConfigError, match=r"reads 3 images, but messages contain .* a list of 3 keys"):
        build_specs(load_config("serve", [*words, *names]))
    build_specs(load_config("serve", [*words, "serve.image_names=[a,b,c]"]))
    build_specs(load_config("serve", [*words, "serve.protocol=vla_eval"]))


def test_browser_origins_are_rejected(openpi):
    with pytest.raises(InvalidStatus, match="403"):
        client.connect(openpi, proxy=None, origin="http://evil.example")
    address = openpi.replace("ws://", "http://") + "/healthz"
    with urllib.request.urlopen(address, timeout=20) as reply:
        assert reply.read() == b"OK\n"
    with pytest.raises(urllib.error.HTTPError, match=r"40|426"):
        urllib.request.urlopen(urllib.request.Request(address, headers={"Origin": "http://evil.example"}), timeout=20)


def test_vla_eval_episodes_run_one_action_at_a_time(vla_eval, openpi):
    """Each request executes one action of a chunk until the chunk or the episode ends."""
    with client.connect(openpi, compression=None, proxy=None) as socket:
        socket.recv(timeout=20)
        chunks = []
        for seed in (0, 1):
            socket.send(pack(observation(seed), encode_openpi_array))
            chunks.append(unpack(socket.recv(timeout=20))["actions"])
    with client.connect(vla_eval, compression=None, proxy=None) as socket:

        def say(kind: str, payload: dict[str, Any], number: int) -> None:
            socket.send(
                pack({"type": kind, "payload": payload, "seq": number, "timestamp": 0.0}, encode_vla_eval_array)
            )

        def ask(seed: int, number: int) -> Any:
            seen = observation(seed)
            payload = {"images": {"any": seen["observation/image"]}, "task_description": seen["prompt"]}
            say("observation", payload, number)
            answer = unpack(socket.recv(timeout=20))
            assert (answer["type"], answer["seq"]) == ("action", number)
            return answer["payload"]["actions"]

        say("hello", {"protocol_version": 1}, 1)
        hello = unpack(socket.recv(timeout=20))
        assert (hello["type"], hello["payload"]["protocol_version"]) == ("hello", 1)
        say("episode_start", {"task": {}}, 2)
        found = [ask(0, 3), ask(1, 4), ask(1, 5), ask(1, 6), ask(1, 7)]
        assert np.array_equal(found, [*chunks[0], chunks[1][0]])
        say("episode_start", {"task": {}}, 8)
        assert np.array_equal(ask(0, 9), chunks[0][0])
        say("episode_end", {}, 10)
        say("observation", {"images": {}, "task_description": "x"}, 10)
        wrong = unpack(socket.recv(timeout=20))
        assert (wrong["type"], wrong["seq"]) == ("error", 10)
        assert "lacks 1 image" in wrong["payload"]["error"]
        assert np.array_equal(ask(0, 11), chunks[0][0])


def test_client_implements_the_vla_eval_protocol(vla_eval, openpi, run, tmp_path):
    words = ("model=remote", "model.num_action_chunks=1")
    one = evaluated(tmp_path / "one", *words, f"model.url={vla_eval}", "model.protocol=vla_eval")
    other = evaluated(tmp_path / "other", *words, f"model.url={openpi}")
    assert one == other


def test_every_wait_has_a_deadline(vla_eval, request):
    """A slow policy, a silent client and a silent server."""
    free, heard = threading.Event(), []
    # In the background of a shell tests inherit that it is ignored, and so would the server.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    class Slow(ObservationHandler):
        def __call__(self, message: object) -> Any:
            free.wait(20)

    def talk(url: str) -> None:
        try:
            with client.connect(url, compression=None, proxy=None) as socket:
                socket.recv(timeout=20)
                socket.send(pack(observation(), encode_openpi_array))
                heard.append(socket.recv(timeout=20))
                free.set()
                with suppress(ConnectionClosed):
                    socket.recv(timeout=20)
                heard.append(socket.close_code)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    def ready(url: str) -> None:
        threading.Thread(target=talk, args=[url], daemon=True).start()

    request = PolicyRequest(env=ENV, device="cpu", seed=0, trainable=False)
    policy = UntrainedPolicy(RANDOM.spec(ModelSettings(model_type="random"), ENV, 0), request)
    cfg = ServeSettings(port=0, answer_timeout_s=0.2, idle_timeout_s=3.0)
    said: list[str] = []
    with pytest.raises(Interrupted):
        asyncio.run(PolicyServer(Slow(policy, ENV, OPENPI), cfg, said.append).run(ready))
    assert heard == ["The policy did not respond within 0.2 s (serve.answer_timeout_s).", 1000]
    assert "sent nothing for 3 s" in said[-1]
    with pytest.raises(EmbodyError, match=r"no reply arrived within 0.3 s .* Fix: model.protocol=vla_eval"):
        build(vla_eval, ENV, answer_timeout_s=0.3)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_client_without_a_message_is_disconnected(host, request, monkeypatch):
    """The printed address is valid for IPv4 and IPv6."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            pytest.skip(f"this host has no address {host}")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    monkeypatch.setattr(server, "_FIRST_MESSAGE_S", 0.2)

    def connect(url: str) -> None:
        try:
            with client.connect(url, compression=None, proxy=None) as connection, suppress(ConnectionClosed):
                while connection.recv(timeout=20):
                    pass
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    policy_request = PolicyRequest(env=ENV, device="cpu", seed=0, trainable=False)
    policy = UntrainedPolicy(RANDOM.spec(ModelSettings(model_type="random"), ENV, 0), policy_request)
    lines: list[str] = []
    running = PolicyServer(ObservationHandler(policy, ENV, OPENPI), ServeSettings(host=host, port=0), lines.append)
    with pytest.raises(Interrupted):
        asyncio.run(running.run(lambda url: threading.Thread(target=connect, args=[url], daemon=True).start()))
    assert lines[-1] == "client 1 sent nothing for 0.2 s (after connecting) after 0 answers"


class Looking(UntrainedPolicy):
    """Policy that stores its observations and always opens the gripper."""

    seen: Observation

    def act(self, obs: Observation, **how: Any) -> Any:
        self.seen = obs
        out = super().act(obs, **how)
        out.actions[..., -1] = 1.0
        return out


def test_served_policy_converts_image_rotation_and_gripper():
    """LIBERO stores images upside down and opens the gripper with -1; the policy opens the gripper with 1."""
    env = replace(ENV, cameras=replace(ENV.cameras, rotation_deg=180), state_dim=2)
    spec = RANDOM.spec(ModelSettings(model_type="random", num_action_chunks=2), env, 0)
    inputs = InputSpec(num_images=2, state=True)
    spec = replace(spec, inputs=inputs, gripper=GripperConvention(open=1.0, closed=0.0))
    policy = Looking(spec, PolicyRequest(env=env, device="cpu", seed=0, trainable=False))
    wrist = observation()["observation/image"][:, ::-1]
    message = observation() | {"observation/state": [1.0, 2.0], "observation/wrist_image": wrist}
    actions = ObservationHandler(policy, env, OPENPI)(message)
    assert np.array_equal(policy.seen.images[0, 0], message["observation/image"][::-1, ::-1])
    assert np.array_equal(policy.seen.images[0, 1], wrist[::-1, ::-1])
    assert np.array_equal(policy.seen.state, [[1.0, 2.0]])
    assert policy.seen.instructions == (message["prompt"],)
    assert np.array_equal(actions, [[0, 0, 0, 0, 0, 0, -1]] * 2)


def real(name: str, url: str) -> Any:
    """Return the output of a client program of a third-party package."""
    done = subprocess.run(
        [str(CLIENTS), str(TESTS / "real_clients.py"), name, url],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@real_clients
def test_openpi_client_connects(openpi):
    said = real("openpi", openpi)
    assert said["metadata"]["action_horizon"] == 4
    assert said["shape"] == [4, 7]
    assert "'observation/image'" in said["error"]
    assert said["again"]


@real_clients
def test_vla_eval_harness_evaluates_a_served_policy(vla_eval):
    """The harness runs two episodes of its own benchmark, four steps each."""
    said = real("vla_eval", vla_eval)
    assert said["episodes"] == 2
    assert said["steps"] == [4, 4]
    assert said["failed"] == 0
    assert said["finite"]


@real_clients
def test_vla_eval_server_acts_in_an_embodyrl_simulator(tmp_path):
    """A vla-eval model server replies with chunks, and another with single actions."""
    for chunked in ("whole", "single"):
        script = [str(CLIENTS), str(TESTS / "real_clients.py"), "serve", chunked]
        with subprocess.Popen(script, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as theirs:
            assert theirs.stdout is not None
            url = theirs.stdout.readline().strip()
            chunk = "4" if chunked == "whole" else "1"
            words = ("model=remote", f"model.num_action_chunks={chunk}", f"model.url={url}", "model.protocol=vla_eval")
            try:
                assert len(evaluated(tmp_path / chunked, *words)) == 6
            finally:
                theirs.kill()
