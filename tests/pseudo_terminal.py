"""A program on a terminal of its own, for tests of what it draws there."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios


def seen_on_terminal(*words: str, term: str = "xterm-256color") -> str:
    """What a Python process writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    environment = os.environ | {"TERM": term, "JAX_PLATFORMS": "cpu"}
    call = [sys.executable, *words]
    run = subprocess.Popen(call, stdout=theirs, stderr=theirs, env=environment, start_new_session=True)
    os.close(theirs)
    seen = b""
    try:
        while select.select([ours], [], [], 60)[0]:
            try:
                part = os.read(ours, 65536)
            # The program has ended.
            except OSError:
                break
            seen += part
    finally:
        run.kill()
        run.wait()
        os.close(ours)
    return seen.decode()
