"""Connect to our server with openpi-client or vla-eval, and print one line of JSON.

python real_clients.py openpi|vla_eval URL
python real_clients.py serve whole|single
python real_clients.py infer URL    (observations and chunks as pickles through standard input and output)
"""

import json
import pickle
import sys
import time

import numpy as np

PROMPT = "reach the target"


def image(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (64, 64, 3), np.uint8)


def openpi(url):
    from openpi_client.action_chunk_broker import ActionChunkBroker
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    policy = WebsocketClientPolicy(url)
    chunk = policy.infer({"observation/image": image(), "prompt": PROMPT})["actions"]
    try:
        policy.infer({"prompt": PROMPT})
        error = ""
    except RuntimeError as refused:
        error = str(refused)
    broker = ActionChunkBroker(policy, 4)
    single = [broker.infer({"observation/image": image(), "prompt": PROMPT})["actions"] for _ in range(4)]
    return {
        "metadata": policy.get_server_metadata(),
        "shape": list(chunk.shape),
        "error": error,
        "again": bool(np.array_equal(np.stack(single), chunk)),
    }


def infer(url):
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    policy = WebsocketClientPolicy(url)
    while (message := pickle.load(sys.stdin.buffer)) is not None:
        arrays = {name: np.array(value, np.uint8 if "image" in name else np.float32) for name, value in message[0]}
        chunk = policy.infer(arrays | {"prompt": message[1]})["actions"]
        sys.stdout.buffer.write(pickle.dumps(chunk.tolist()))
        sys.stdout.flush()
    return {}


def vla_eval(url):
    import tempfile

    from vla_eval.api import run

    benchmark = {"benchmark": "real_clients:Table", "episodes_per_task": 2, "max_steps": 4, "params": {}}
    with tempfile.TemporaryDirectory() as folder:
        config = {"server": {"url": url}, "benchmarks": [benchmark], "output_dir": folder}
        result = run(config, docker=False, no_save=True)[0]
    episodes = [episode for task in result["tasks"] for episode in task["episodes"]]
    return {
        "episodes": len(episodes),
        "steps": [episode["steps"] for episode in episodes],
        "failed": sum("failure_reason" in episode for episode in episodes),
        "finite": all(np.isfinite(action).all() and len(action) == 7 for action in Table.seen) and len(Table.seen) == 8,
    }


def serve(kind):
    from vla_eval.api import serve_background
    from vla_eval.model_servers.predict import PredictModelServer

    class Server(PredictModelServer):
        def predict(self, obs, ctx):
            assert obs["task_description"]
            assert next(iter(obs["images"].values())).dtype == np.uint8
            return {"actions": np.zeros((4, 7), np.float32)}

    with serve_background(Server(chunk_size=None if kind == "whole" else 4)) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        time.sleep(3600)  # until it is killed


if "vla_eval" in sys.argv or __name__ == "real_clients":
    from vla_eval.benchmarks.base import StepBenchmark, StepResult

    class Table(StepBenchmark):
        """A benchmark that shows noise images."""

        seen = []
        render_backends = frozenset({"gpu", "cpu"})

        def get_tasks(self):
            return [{"name": PROMPT}]

        def reset(self, task):
            self.count = 0
            return image()

        def step(self, action):
            self.count += 1
            type(self).seen.append(action["actions"])
            sys.modules["__main__"].Table.seen = type(self).seen
            return StepResult(obs=image(self.count), reward=0.0, done=False, info={})

        def make_obs(self, raw_obs, task):
            return {"images": {"agentview": raw_obs}, "task_description": task["name"]}

        def get_step_result(self, step_result):
            return {"success": False}


if __name__ == "__main__":
    answer = {"openpi": openpi, "vla_eval": vla_eval, "serve": serve, "infer": infer}[sys.argv[1]](sys.argv[2])
    sys.stdout.write(json.dumps(answer) + "\n")
