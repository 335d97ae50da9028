"""GPU-only bugs, seeded one at a time: the checks of this folder must detect each of them.

Each bug is inserted into the source on import, in a process forked before embodyrl was loaded. A check is the
complete life of a policy process (`on_process.py`), or a test of another file of this folder.

    python tests/fakegpu/mutants.py     same requirements as `rows.py`
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@dataclass(frozen=True)
class Bug:
    """`module` with `old` replaced by `new`."""

    kind: str
    module: str
    old: str
    new: str
    check: str = "process"


BUGS = {
    "a batch stays on the host": Bug(
        "placement", "embodyrl.learners.policy_gradient", "to_device(value, device)", "torch.as_tensor(value)"
    ),
    "noise is drawn on the host": Bug(
        "placement",
        "embodyrl.policies.openvla_oft.discrete",
        "to_device(noise, inputs.prompt_ids.device)",
        "torch.as_tensor(noise)",
    ),
    "the first device instead of its own": Bug(
        "placement",
        "embodyrl.policies.openvla_oft.model",
        "offset = torch.arange(self.options.num_action_tokens + more_rows, device=embeddings.device)",
        'offset = torch.arange(self.options.num_action_tokens + more_rows, device="cuda:0")',
        check="policy",
    ),
    "numpy of what is on the device": Bug(
        "placement", "embodyrl.policies.vla.sampling", "value=value.cpu().numpy()", "value=value.numpy()"
    ),
    "frozen weights meet float32 pixels": Bug(
        "dtype",
        "embodyrl.policies.openvla_oft.policy",
        "torch.bfloat16 if uses_bf16 and not request.trainable else torch.float32",
        "torch.float32",
        check="policy",
    ),
    "pixels are prepared in the compute precision": Bug(
        "dtype",
        "embodyrl.policies.openvla_oft.inputs",
        "with torch.no_grad(), torch.autocast(device.type, enabled=False):\n        if pipeline",
        "with torch.no_grad():\n        if pipeline",
        check="policy",
    ),
    "the reference stays in float32": Bug(
        "dtype",
        "embodyrl.workers.building",
        "            cast_to_bfloat16(reference.module, sharded=init.shards)",
        "            pass",
        check="reference",
    ),
    "a wait in every micro-batch": Bug(
        "waits",
        "embodyrl.learners.training",
        "losses.append(micro_batch_loss.detach())",
        "losses.append(micro_batch_loss.detach()); micro_batch_loss.item()",
    ),
    "a copy waits for all that was asked before": Bug(
        "waits", "embodyrl.policies.tensors", "host.pin_memory().to(device, non_blocking=True)", "host.to(device)"
    ),
    "acting keeps what a backward pass needs": Bug(
        "memory", "embodyrl.policies.openvla_oft.policy", "    @torch.no_grad()\n    def act(", "    def act("
    ),
    "gradients are kept while acting": Bug(
        "memory",
        "embodyrl.learners.policy_gradient",
        "        self._trainer.optimization.zero_grad()\n        # Statistics change after the update",
        "        # Statistics change after the update",
    ),
    "new weights are not announced": Bug(
        "staleness",
        "embodyrl.learners.training",
        "            mark_weights_changed(self._module)\n",
        "",
        check="engine",
    ),
    "an engine that slept is not loaded anew": Bug(
        "staleness",
        "embodyrl.policies.causal_lm.engine",
        "if version == self._synced_version and not self._is_asleep:",
        "if version == self._synced_version:",
        check="engine",
    ),
    "a recorded pass keeps what weights were cast to": Bug(
        "staleness",
        "embodyrl.policies.openvla_oft.policy",
        "self._autocast = mixed(cache_enabled=not cfg.cuda_graphs)",
        "self._autocast = mixed()",
    ),
    "norms run in float32 under autocast": Bug(
        "dtype",
        "embodyrl.policies.openvla_oft.llama",
        "            with torch.autocast(x.device.type, enabled=False):\n                return F.rms_norm(",
        "            if True:\n                return F.rms_norm(",
        check="norms",
    ),
    "a resumed optimizer keeps its count of steps on the host": Bug(
        "placement",
        "embodyrl.learners.training",
        "groups = [saved | settings for",
        "groups = [saved | settings | {'fused': saved['fused']} for",
        check="resume",
    ),
    "every rank recomputes the whole batch": Bug(
        "speed",
        "embodyrl.learners.policy_gradient",
        "for rows in self._ranks.rank_info.get_slices(len(batch.records), self._cfg.micro_batch_size):\n"
        "            records = batch.records[rows]",
        "for start in range(0, len(batch.records), self._cfg.micro_batch_size):\n"
        "            rows = slice(start, start + self._cfg.micro_batch_size)\n"
        "            records = batch.records[rows]",
        check="recomputed",
    ),
    "products of adapted layers are not counted": Bug(
        "speed", "gpu", "{torch.ops.aten.addmm_: _added_flops}", "{}", check="flops"
    ),
    "an unordered sum": Bug(
        "order",
        "embodyrl.policies.tensors",
        "return compute_integer_sums(probability) if exact else probability.cumsum(-1)",
        "return probability.cumsum(-1)",
        check="policy",
    ),
}


GONE = "the line that the bug is put into is no longer there"
PRELOADED = ("fakegpu", "pytest", "torch.distributed.fsdp", "peft", "transformers", "pydantic", "yaml")
"""Modules that child processes need not import again: torch and others, but nothing of embodyrl."""


class _Seed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that inserts a bug into one module."""

    def __init__(self, bug: Bug) -> None:
        self.bug = bug
        self.source = ""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.bug.module:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        assert found is not None
        assert found.origin is not None
        self.source = Path(found.origin).read_text()
        assert self.source.count(self.bug.old) == 1, GONE
        return importlib.util.spec_from_file_location(name, found.origin, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source.replace(self.bug.old, self.bug.new), str(module.__file__), "exec"), vars(module))


def _process(name: str) -> Callable[[], None]:
    def check() -> None:
        process = importlib.import_module("on_process")
        with tempfile.TemporaryDirectory() as folder:
            process.check(process.JOBS[name], Path(folder))

    return check


def _policy() -> None:
    import torch
    from fakegpu import FakeGpu

    policies: Any = importlib.import_module("on_policies")
    torch.use_deterministic_algorithms(True)
    for case in ("official", "eval"):
        with FakeGpu() as gpu, tempfile.TemporaryDirectory() as folder:
            policies.use_oft(case, policies.Precision.bf16, gpu, Path(folder))


def _engine() -> None:
    engine: Any = importlib.import_module("on_engine")
    with pytest.MonkeyPatch.context() as patch:
        for sleeps in (False, True):
            engine.test_vllm_reloads_weights_after_every_update(patch, sleeps)


def _norms() -> None:
    import torch

    harness: Any = importlib.import_module("on_harness")
    harness.test_policy_norms_keep_their_dtype_under_autocast(torch.bfloat16)


def _resume() -> None:
    harness: Any = importlib.import_module("on_harness")
    harness.test_cpu_run_resumes_on_a_gpu()


def _flops() -> None:
    with tempfile.TemporaryDirectory() as folder:
        importlib.import_module("on_benchmark").test_counted_flops_match_the_kernels(False, Path(folder))


CHECKS = {
    "flops": _flops,
    "norms": _norms,
    "resume": _resume,
    "recomputed": _process("recomputed on 8"),
    "process": _process("values, recomputed"),
    "reference": _process("reference on 8"),
    "policy": _policy,
    "engine": _engine,
}


def outcome(bug: Bug | None, check: str) -> str:
    """Return the output of a failed check for a seeded bug, in a forked process; empty: not detected."""
    assert not any(name.partition(".")[0] == "embodyrl" for name in sys.modules), "ours must not be loaded yet"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = ""
        try:
            if bug is not None:
                sys.meta_path.insert(0, _Seed(bug))
            CHECKS[check]()
        except BaseException as error:
            said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            if GONE in said or os.environ.get("FAKEGPU_PRINT"):
                traceback.print_exc()
        os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bugs whose text begins so")
    args = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    quiet = [check for check in CHECKS if not args.only and (said := outcome(None, check))]
    print("| bug | kind | caught by | says |\n|---|---|---|---|")
    missed = [f"finds something where nothing is wrong: {check}" for check in quiet]
    for name, bug in BUGS.items():
        if not name.startswith(args.only):
            continue
        said = outcome(bug, bug.check)
        print(f"| {name} | {bug.kind} | {bug.check} | {said[:90]} |", flush=True)
        if not said or GONE in said:
            missed.append(f"{name}: {said or 'nothing noticed'}")
    sys.exit("\n".join(missed) or None)


if __name__ == "__main__":
    main()
