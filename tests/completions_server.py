"""Small completions server with vLLM's API and a transformers model: FOLDER on the command line.

The server prints its port. Adapters are loaded and unloaded as with VLLM_ALLOW_RUNTIME_LORA_UPDATING.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

FOLDER = sys.argv[1]
models: dict[str, Any] = {}
one_at_a_time = threading.Lock()


def plain_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@torch.no_grad()
def complete(asked: dict[str, Any]) -> dict[str, Any]:
    model, ids = models[asked["model"]], list(asked["prompt"])
    if asked.get("echo"):
        told = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        given = [None, *(float(row[token]) for row, token in zip(told, ids[1:], strict=True)), 0.0]
        return {"choices": [{"index": 0, "logprobs": {"token_logprobs": given}}]}
    draws = torch.Generator().manual_seed(asked.get("seed", 0))
    ends = {2, *(asked.get("stop_token_ids") or [])}
    said: list[int] = []
    logprobs: list[float] = []
    top: list[dict[str, float]] = []
    while len(said) < asked["max_tokens"] and not (said and said[-1] in ends):
        logits = model(input_ids=torch.tensor([ids + said])).logits[0, -1].float()
        raw = logits.log_softmax(-1)
        if len(said) < asked.get("min_tokens", 0):
            logits[list(ends)] = -torch.inf
        if asked.get("top_k"):
            logits[logits < logits.topk(asked["top_k"]).values[-1]] = -torch.inf
        if asked["temperature"] == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / asked["temperature"]).softmax(-1), 1, generator=draws))
        said.append(token)
        logprobs.append(float(raw[token]))
        if asked["logprobs"]:
            assert asked["return_tokens_as_token_ids"]
            likely = {token, *raw.topk(asked["logprobs"]).indices.tolist()}
            top.append({f"token_id:{i}": float(raw[i]) for i in likely})
    assert asked["return_token_ids"]
    told = {"token_logprobs": logprobs, "top_logprobs": top or None}
    return {"choices": [{"index": 0, "token_ids": said, "logprobs": told}]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": name} for name in models]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with one_at_a_time:
            match self.path:
                case "/v1/completions" if max(body["prompt"]) >= models["tiny"].config.vocab_size:
                    self.reply(400, {"error": f"token id {max(body['prompt'])} is out of vocabulary"})
                case "/v1/completions":
                    self.reply(200, complete(body))
                case "/v1/load_lora_adapter" if body["lora_name"] in models:
                    self.reply(400, {"error": f"'{body['lora_name']}' has already been loaded"})
                case "/v1/load_lora_adapter":
                    adapted = PeftModel.from_pretrained(plain_model(), body["lora_path"]).eval()
                    models[body["lora_name"]] = adapted
                    self.reply(200, "Success: added")
                case "/v1/unload_lora_adapter":
                    del models[body["lora_name"]]
                    self.reply(200, "Success: removed")
                case _:
                    self.reply(404, {"error": f"no {self.path}"})

    def reply(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


ThreadingHTTPServer.request_queue_size = 64  # as many connections as a client opens at once

if __name__ == "__main__":
    torch.set_num_threads(1)
    models["tiny"] = plain_model()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()
