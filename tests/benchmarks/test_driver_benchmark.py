"""The driver benchmark runs all chunks, and the rollout processes of many hosts get equal shares."""

import json
import subprocess
import sys

import pytest
from processes import SOURCE, command_environment


@pytest.mark.integration
def test_rollout_processes_of_many_hosts_get_equal_shares(tmp_path):
    words = ["--hosts", "1", "8", "--envs", "256", "--rounds", "1", "--json", "out.json"]
    done = subprocess.run(
        [sys.executable, str(SOURCE / "benchmarks" / "driver.py"), *words],
        cwd=tmp_path,
        env=command_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    alone, many = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (alone["hosts"], many["hosts"], many["workers"]) == (1, 8, 128)
    assert alone["chunks"] == many["chunks"] == 256 * 8
    assert alone["largest_share"] == 1
    assert many["largest_share"] < 1.5
    assert many["us_per_chunk"] > 0
