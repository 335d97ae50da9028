"""Child process that runs reward functions on batches of answers, with JSON lines as messages."""

import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Mapping

from embodyrl.text.rewards.services import find_reward
from embodyrl.text.sandbox import RejectedTest


def main() -> None:
    """Compute rewards until the input ends; SIGALRM ends the process at the time limit of an answer."""
    names, timeout_s = json.loads(sys.argv[1])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    warnings.simplefilter("error", RejectedTest)  # reported as a reward error
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the output of reward functions must not mix with the replies
    try:
        functions = [find_reward(name) for name in names]
        for function in functions:
            if prepare := getattr(function, "prepare", None):
                prepare()
    except Exception as error:  # the parent reports it to the user
        out.write(" ".join(f"{type(error).__name__}: {error}".split())[:300] + "\n")
        return
    out.write("ready\n")
    for line in sys.stdin:
        for prompt, response, reference in json.loads(line):
            # One alarm for all functions of an answer, reset for each answer.
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            reply: list[float] | str = []
            try:
                for function in functions:
                    value = function(prompt, response, reference)
                    if isinstance(value, Mapping):
                        reply += [float(value[name]) for name in function.components]  # type: ignore[attr-defined]
                    else:
                        reply.append(float(value))
                if not all(map(math.isfinite, reply)):
                    raise ValueError(f"the rewards {reply} must be finite numbers")
            except Exception as error:  # any error of a user's function is a reply too
                reply = f"{type(error).__name__}: {error}"[:300]
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            out.write(json.dumps(reply) + "\n")
