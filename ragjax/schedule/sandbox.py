"""A grammar read in a process of its own first, whose memory and time have limits.

llguidance is native code. It follows references by recursion, and where its stack ends the process ends; a schema of a
few hundred bytes can ask for any amount of memory. Neither is an error that Python sees, and no bound on the schema's
text is known that covers both. What a small process survives, the server survives.
"""

from __future__ import annotations

import subprocess
import sys

from ragjax.core import RequestError

MEMORY = 512
"""MiB of address space for the process, of which Python and llguidance take 170."""

SECONDS = 2
"""Of processor time for the process; an ordinary schema takes a tenth of one."""

WAIT_S = 60.0
"""Seconds until the process is given up on a machine that is busy."""

STACK = 8 * 2**20
"""Bytes of stack to read with. Whoever reads the grammar afterwards needs at least as much."""

_READ = f"""
import resource, sys, threading
from llguidance import LLMatcher, LLTokenizer

def read():
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(sys.stdin.buffer.read().decode()), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    print("read")

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY * 2**20},) * 2)
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
threading.stack_size({STACK})
reader = threading.Thread(target=read)
reader.start()
reader.join()
"""


def check(grammar: str, param: str) -> None:
    """Check that llguidance can read a grammar within the limits; it may be wrong otherwise.

    grammar: in Lark. param: the field it comes from.

    Raises:
        RequestError: if it cannot.
    """
    command = (sys.executable, "-I", "-c", _READ)
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.stdout == b"read\n":
        return
    if done is not None and done.returncode > 0:  # Python's own end: nothing that a schema does
        raise RuntimeError(f"grammars cannot be read: {done.stderr.decode(errors='replace')[-500:]}")
    raise RequestError(
        f"the schema takes more than {SECONDS} s, {MEMORY} MiB or the stack that there is to be read: "
        "nest less, and use fewer references and patterns",
        param=param,
        code="invalid_schema",
    )
