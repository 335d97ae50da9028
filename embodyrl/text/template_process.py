"""Process that renders chat templates with Jinja's sandbox and limits of CPU time, memory and length.

`chat.py` runs this file as a script, which does not import embodyrl.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S, MEMORY_BYTES, LONGEST_TEXT = 1.0, 1 << 29, 1 << 24
"""Limits: CPU time per conversation, memory of the process, length of a rendered conversation in characters."""


class _Generation(Extension):
    """Jinja extension that renders the content of {% generation %} tags, which mark trained tokens."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    def raise_error(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        settings: dict[str, Any] = {"ensure_ascii": False} | options
        return json.dumps(value, **settings)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_error, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def serve(pipe: Any) -> None:
    """Render each request, JSON of (template, variables), until the pipe closes or a limit is exceeded.

    A reply is (True, text), or (False, reason) if the template raises an error.
    """
    while True:
        try:
            source, variables = json.loads(pipe.recv())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF ends the process
        try:
            reply = True, _compile(source).render(**variables)
        except MemoryError:
            return
        except Exception as error:
            reply = False, " ".join(f"{error}".split())[:200]
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if len(reply[1]) > LONGEST_TEXT:
            return
        pipe.send(reply)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    serve(Connection(int(sys.argv[1])))
