"""A reward that starts a program in a session of its own and leaves it there; the number of that process is its value."""

import subprocess


def leaves_a_child(completion: str, example: dict) -> float:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    return float(child.pid)
