"""The channel benchmark runs and counts one copy per observation."""

import json
import subprocess
import sys

import pytest
from processes import SOURCE, command_environment


@pytest.mark.slow
def test_channel_benchmark_runs(tmp_path):
    words = ["--no-ray", "--turns", "1", "--budget", "0.01", "--json", "out.json", "--sizes"]
    done = subprocess.run(
        [sys.executable, str(SOURCE / "benchmarks" / "channel.py"), *words, "3.1 MB"],
        cwd=tmp_path,
        env=command_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["machine"]["cores"] >= 1
    rows = report["rows"]
    assert all(set(row) == {"what", "unit", "ours", "against", "theirs", "ratio", "goal"} for row in rows)
    assert {row["goal"] for row in rows if row["unit"] == "us"} == {None, 0.67, 4.0, 20.0}
    copies = {row["against"]: (row["ours"], row["theirs"]) for row in rows if row["unit"] == "copies"}
    assert copies["ours, copied"] == (1, 2)
    ours, queue = copies["multiprocessing.Queue"]
    assert ours == 1
    assert queue >= 3
