"""Scripts that run in another Python interpreter."""

import sys
from pathlib import Path

import pytest

from embodyrl import external_python
from embodyrl.errors import EmbodyError
from embodyrl.external_python import ExternalScript

LEAVES_A_THREAD = """
import sys, threading
from multiprocessing.connection import Connection

with Connection(int(sys.argv[1])) as pipe:
    pipe.recv()
    threading.Thread(target=threading.Event().wait).start()
"""
"""Script that ends without a reply; its thread keeps the process alive."""


def test_script_whose_thread_outlives_it_is_killed_and_reported(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(external_python, "_EXIT_TIMEOUT_S", 0.1)
    (tmp_path / "script.py").write_text(LEAVES_A_THREAD)
    script = ExternalScript(sys.executable, str(tmp_path / "script.py"), key="env.python", program="robosuite")
    with pytest.raises(EmbodyError, match=r"robosuite in .* exited with code -9"):
        script.call("request", 60.0, "faults.step_timeout_s")
