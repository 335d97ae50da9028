"""The documented ways to start a cluster run as they are written, with a token, on three hosts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from lab import COUNT, Lab
from outcomes import ROLLOUT, on_one_host, result, words
from processes import SOURCE, wait_until
from toy_runs import rows

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/net/tun").exists(), reason="network namespaces need root and /dev/net/tun"
    ),
]
SPREAD = ("launcher.env_workers=2", "runner.max_steps=3")
HELD = (*SPREAD, "algorithm.adv_type=toy_gates:GATED_GRPO")
SRUN = """#!{python}
import signal, subprocess, sys
hosts, words = {hosts}, sys.argv[1:]
while words[0].startswith("-"):
    name, _, value = words.pop(0).partition("=")
    if name == "-w":
        hosts = {{words[0]: hosts[words.pop(0)]}}
    elif name == "--exclude":
        del hosts[value]
token = {{"RAY_AUTH_MODE": "token"}}
started = [subprocess.Popen(prefix + words, env=environ | token) for prefix, environ in hosts.values()]
signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in started])
sys.exit(max(process.wait() for process in started))
"""
"""Program that runs a command on hosts of the lab, as Slurm's srun does with the arguments of the example."""


@pytest.fixture
def empty(bare_lab: Lab, tmp_path: Path) -> Lab:
    """Three hosts without Ray nodes, and a folder of programs that the examples call."""
    bare_lab.switch.restore()
    bare_lab.lose_all()
    for path in bare_lab.gate.parent.glob("gate*"):
        path.unlink()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in (("ray", "ray.scripts.scripts"), ("embodyrl", "embodyrl.cli.main")):
        code = f"import sys; from {module} import main; sys.exit(main())"
        (programs / name).write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
        (programs / name).chmod(0o755)
    return bare_lab


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), **more}


def shell(lab: Lab, host: int, script: str, tmp_path: Path, *args: str, **more: str) -> subprocess.Popen[bytes]:
    """Start a shell script on a host."""
    with open(tmp_path / f"shell_{host}.txt", "ab") as out:
        command = ("bash", "-c", script, "bash", *args)
        return lab.start_on(host, command, out, out, **environment(tmp_path, **more))


def printed(tmp_path: Path) -> str:
    return "".join(path.read_text() for path in sorted(tmp_path.glob("shell_*.txt")))


def test_documented_cluster_commands_start_a_run(empty, tmp_path):
    expected = on_one_host(tmp_path, ROLLOUT, "launcher.env_workers=2")
    page = (SOURCE / "docs" / "howto" / "cluster.md").read_text()
    block = page.partition("\n    # on every host")[2].partition("\n\n")[0].replace("\\\n", " ")
    block = block.replace("FIRST_HOST", "host0")
    lines = [line.strip() for line in block.splitlines() if not line.strip().startswith("#")][1:]
    export, head, other, train = lines
    assert shell(empty, 0, "ray get-auth-token --generate", tmp_path).wait(60) == 0, printed(tmp_path)
    assert shell(empty, 0, f"{export}\n{head}", tmp_path).wait(120) == 0, printed(tmp_path)
    for host in range(1, COUNT):
        assert shell(empty, host, f"{export}\n{other}", tmp_path).wait(120) == 0, printed(tmp_path)
    train, replaced, _ = train.partition("env=libero_10 model=openvla_oft ...")
    assert replaced
    command = f"{export}\n{train} {shlex.join(words(tmp_path, ROLLOUT, 'launcher.env_workers=2'))}"
    assert shell(empty, 0, command, tmp_path).wait(300) == 0, printed(tmp_path)
    assert result(tmp_path / "run") == expected
    (tmp_path / ".ray" / "auth_token").unlink()
    assert shell(empty, 0, f"{command} runner.experiment_name=no_token", tmp_path).wait(120) != 0, printed(tmp_path)
    assert "cannot be joined. Check it with `ray status`, and export the same RAY_AUTH_MODE" in printed(tmp_path)
    assert not rows(tmp_path / "no_token")
    empty.lose_all()


def stopped_and_resumed(empty: Lab, tmp_path: Path, job: Callable[[], subprocess.Popen[bytes]]) -> None:
    """Start a job, send SIGTERM in its second update, and submit it once more."""
    expected = on_one_host(tmp_path, ROLLOUT, *SPREAD)
    first = job()
    waits = lambda: empty.gate.exists() or first.poll() is not None  # noqa: E731
    assert wait_until(waits, 300), printed(tmp_path)
    assert first.poll() is None, printed(tmp_path)
    os.kill(first.pid, signal.SIGTERM)
    empty.gate.with_suffix(".open").touch()
    assert first.wait(120) == 143, printed(tmp_path)
    assert "embodyrl train --resume" in printed(tmp_path)
    empty.lose_all()
    assert job().wait(400) == 0, printed(tmp_path)
    empty.lose_all()
    assert result(tmp_path / "run") == expected


def test_slurm_job_stops_with_a_checkpoint_and_resumes(empty, tmp_path):
    environ = environment(tmp_path)
    hosts = {f"host{host}": (empty.on(host), empty.environment(host) | environ) for host in range(COUNT)}
    (tmp_path / "bin" / "srun").write_text(SRUN.format(python=sys.executable, hosts=hosts))
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\nprintf 'host0\\nhost1\\nhost2\\n'\n")
    for name in ("srun", "scontrol"):
        (tmp_path / "bin" / name).chmod(0o755)
    assert shell(empty, 0, "ray get-auth-token --generate", tmp_path).wait(60) == 0, printed(tmp_path)
    script = (SOURCE / "examples" / "slurm.sh").read_text()
    train = words(tmp_path, ROLLOUT, *HELD)
    stopped_and_resumed(
        empty, tmp_path, lambda: shell(empty, 0, script, tmp_path, *train, SLURM_JOB_NODELIST="host[0-2]")
    )


def test_kubernetes_job_stops_with_a_checkpoint_and_resumes(empty, tmp_path):
    service, job = yaml.safe_load_all((SOURCE / "examples" / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"] == job["metadata"]["name"] == "train"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == COUNT
    (container,) = pod["containers"]
    assert container["command"] == ["bash", "-c"]
    script, replaced, rest = container["args"][0].partition("runner.output_dir=/runs")
    assert replaced
    assert rest.strip() == "runner.experiment_name=my_run env=libero_10 model=openvla_oft"
    train = script + shlex.join(words(tmp_path, ROLLOUT, *HELD))

    def pods() -> subprocess.Popen[bytes]:
        more = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
        started = [shell(empty, host, train, tmp_path, JOB_COMPLETION_INDEX=str(host), **more) for host in range(COUNT)]
        return started[0]

    stopped_and_resumed(empty, tmp_path, pods)
