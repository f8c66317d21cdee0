"""Code against tests: right and wrong code, and code that attacks what runs it. Linux only."""

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunix_lite.rewards.code import PassesTests, code_in
from tunix_lite.rewards.scores import Score
from tunix_lite.workers import sandbox
from tunix_lite.workers.process import find_marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
# Containers often refuse namespaces; no code runs there.
UNSHARE = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x30000000) != 0)"
if sys.platform == "linux" and subprocess.run([sys.executable, "-I", "-c", UNSHARE]).returncode:
    pytest.skip("this kernel refuses namespaces", allow_module_level=True)

FAST = PassesTests(seconds=0.6, memory_mib=512)
ADD = "def add(a, b):\n    return a + b\n"


def block(source: str) -> str:
    return f"Here it is:\n\n```python\n{source}\n```\nThat is all."


def kind(score: float) -> str:
    return score.kind if isinstance(score, Score) else ""


# ---- right and wrong code


@pytest.mark.parametrize(
    ("source", "tests", "score"),
    [
        (ADD, ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"], 1),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], 0.5),
        (ADD + "if __name__ == '__main__':\n    print(add(*map(int, input())))\n", ["assert add(1, 2) == 3"], 1),
        ("def add(a, b:", ["assert add(1, 2) == 3"], 0),
        ("a, b = map(int, input().split())\nprint(a + b)", [{"input": "1 2\n", "output": "3\n"}], 1),
        ("a, b = map(int, input().split())\nprint(a + b)", [{"input": "1 2", "output": "4"}], 0),
        ("print('é', input())", [{"input": "ü", "output": "é ü"}], 1),
    ],
)
def test_the_share_of_tests_that_pass(source, tests, score):
    assert PassesTests(all_or_nothing=False)(block(source), {"tests": tests}) == score
    if score == 0.5:
        assert PassesTests()(block(source), {"tests": tests}) == 0


TRICKS = {
    "the nonce of a frame": """
import os, sys
def found(frame):
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, str) and len(value) == 32:
                return value
        frame = frame.f_back
nonce = found(sys._getframe())
if nonce:
    os.write(3, nonce.encode())
    os._exit(0)
""",
    "another test in a frame": """
import sys
frame = sys._getframe()
while frame:
    for value in frame.f_locals.values():
        if isinstance(value, dict) and "test" in value:
            value["test"] = "pass"
        if isinstance(value, list):
            value[:] = [("pass", "test.py") for _ in value]
    frame = frame.f_back
""",
    "exec": "import builtins\nbuiltins.exec = lambda *given: None",
    "compile": "import builtins\nreal = builtins.compile\nbuiltins.compile = lambda *given: real('pass', '', 'exec')",
    "write": "import os\nos.pread = lambda *given: b''\nos.write = lambda *given: 0",
    "the end": "import os\nos._exit(0)",
    "a thread": "import threading, os\nthreading.Timer(0.05, os._exit, [0]).start()",
    "a guess": "import os\nos.write(3, b'0' * 32)\nos._exit(0)",
}


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_does_not_pass_a_test(name):
    assert FAST(block(TRICKS[name]), {"tests": ["assert False"]}) == 0


SAYS_YES = """
class Yes{base}:
    def __eq__(self, other):
        return True
    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__
    __hash__ = None
def f(*_):
    return Yes()
"""
READS_FILES = """
import os
for n in range(3, 64):
    try:
        said = os.pread(n, 64, 0)
    except OSError:
        continue
    if said:
        os.write(3, said)
        os._exit(0)
"""
NO_REPORTS = "import sys\ndef f(_):\n    sys._getframe(1).f_globals['__report__'] = lambda *_: None\n    return 1\n"


@pytest.mark.parametrize(
    ("source", "test"),
    [
        (SAYS_YES.format(base=""), "assert f(1) == 2"),
        (SAYS_YES.format(base="(int)"), "assert f(1) == 2"),
        (SAYS_YES.format(base="(list)"), "def check(it):\n    assert it(1) == [2]\ncheck(f)"),
        (READS_FILES, "assert f(1) == 2"),
        (READS_FILES, "cases = [(1, 2)]\nfor x, y in cases:\n    assert f(x) == 2"),
        (NO_REPORTS, "assert f(1) == 2\nassert f(1) == 2"),
        ("import builtins\nbuiltins.abs = lambda _: 0\ndef f(_):\n    return 5", "assert abs(f(1) - 1.4) < 0.01"),
        ("import os\ndef f(_):\n    if os.fork():\n        os._exit(0)\n    return 1", "assert f(1) == 2"),
        ('import os\nos.write(3, b\'[0, [{"int": "0x1"}], null]\\n\')\nos._exit(0)', "assert f(1) == 1"),
    ],
)
def test_what_a_test_expects_is_not_where_the_code_is(source, test):
    assert PassesTests(seconds=3.0)(block(source), {"tests": [test]}) == 0


RIGHT = """
from collections import Counter, defaultdict, namedtuple
from decimal import Decimal
from fractions import Fraction
class Point:
    def __init__(self, x):
        self.x = x
    def __eq__(self, other):
        return self.x == other.x
values = [None, True, -3, 10**5000, 1.5, float('inf'), 1 + 2j, 'é\\n', b'x', (1, 2), [1, [2]], {1}, frozenset([1])]
values += [{(1, 2): None}, range(3), Counter('aab'), defaultdict(int, a=1), namedtuple('N', 'a b')(1, 2)]
values += [Fraction(1, 2), Decimal('1.5')]
def f(n):
    if n < 0:
        raise ValueError('n')
    return values[n]
"""
RIGHT_TESTS = """
assert f(0) is None and f(1) is True and not f(2) != -3, 'a message'
assert f(3) == 10**5000
assert f(4) == 1.5 and 1 < f(4) <= 1.5 and f(5) == float('inf')
assert f(6) == 1 + 2j
assert f(7) == 'é\\n' and f(8) == b'x' and f(9) == (1, 2) and f(10) == [1, [2]]
assert f(11) == {1} and f(12) == {1} and f(13) == {(1, 2): None} and list(f(14)) == [0, 1, 2]
assert f(15) == {'a': 2, 'b': 1} and f(16) == {'a': 1} and f(17) == (1, 2)
assert f(18) == 0.5 and f(19) == 1.5 and f(19) not in [1, 2]
assert Point(1) == Point(1) and not Point(1) == Point(2) and Point(3).x == 3 and Point(1) is not None
assert 1 in f(10) and f(10)[1][0] == 2 and len(f(10)) == 2 and abs(f(4) - 1.49) < 0.1
try:
    f(-1)
    assert False
except ValueError:
    pass
def check(it):
    for n, right in [(4, 1.5), (2, -3)]:
        assert it(n) == right
check(f)
"""


def test_right_code_passes_tests_of_all_forms():
    assert PassesTests(seconds=3.0)(block(RIGHT), {"tests": [RIGHT_TESTS, "f(1)", "assert f(1)"]}) == 1


def test_the_last_block_of_python_is_run():
    assert code_in("```python\na\n```\nor\n```py\nb\n```\n```bash\nls\n```") == "b\n"
    assert code_in("```\na\n```") == "a\n"
    assert code_in("print(3)") is None and code_in("```python\nprint(3)") is None and code_in("") is None
    assert kind(FAST("no code", {"tests": ["assert True"]})) == "no_answer"


# ---- attacks


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder that is none of the code's, the one for temporary folders, and the processes that this test started."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    mark = f"{tmp_path}-{os.getpid()}"
    monkeypatch.setenv("TUNIX_LITE_TEST", mark)
    processes = partial(find_marked, f"TUNIX_LITE_TEST={mark}".encode())
    return SimpleNamespace(outside=tmp_path / "outside", temporary=tmp_path / "temporary", processes=processes)


SLEEPS = "import time\ntime.sleep(97)\n"
ATTACKS = {  # and what stops them; "": they end by themselves; None: it depends on kernel and time
    "infinite loop": ("while True:\n    pass", "stopped"),
    "ignores signals": (
        "import signal\nfor n in range(1, 65):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass",
        "stopped",
    ),
    "fork bomb": ("import os\nwhile True:\n    os.fork()", "stopped"),
    "forks that leave": (
        "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0:\n            time.sleep(97)\n        os._exit(0)\ntime.sleep(97)",
        "stopped",
    ),
    "huge output": ("while True:\n    print('x' * 100_000)", "stopped"),
    "memory hog": ("x = 'x' * (4 * 10**9)", "stopped"),
    "writes outside": ("open('OUTSIDE/new', 'w').write('x')", ""),
    "removes outside": ("import shutil\nshutil.rmtree('OUTSIDE')", ""),
    "fills the disk": ("while True:\n    open('x', 'ab').write(bytes(2**20))", ""),
    "kills all": ("import os\nos.kill(-1, 9)\n" + SLEEPS, ""),
    "stops its group": ("import os\nos.killpg(0, 19)", "stopped"),
    "closes its pipes": ("import os\nos.closerange(0, 64)\n" + SLEEPS, "stopped"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_code_that_attacks_gets_nothing_and_leaves_nothing(name, places):
    source, expected = ATTACKS[name]
    began = time.monotonic()
    score = FAST(block(source.replace("OUTSIDE", str(places.outside))), {"tests": ["assert True"]})
    assert score == 0 and kind(score) in ({expected} if expected is not None else {"", "stopped"})
    assert time.monotonic() - began < 20
    assert [file.name for file in places.outside.iterdir()] == ["kept"]
    assert not [*places.temporary.iterdir()]
    assert not places.processes(), "a process of the code is left"


def test_code_reaches_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"
        assert FAST(block(source), {"tests": ["assert True"]}) == 0
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_limit_is_named_and_all_tests_together_have_one():
    score = FAST(block("while True: pass"), {"tests": ["assert True"] * 50})
    assert score.why == "its code took more than `seconds`"
    began = time.monotonic()
    share = PassesTests(seconds=0.3, total_seconds=0.8, all_or_nothing=False)
    score = share(block("import time\ntime.sleep(0.2)"), {"tests": ["assert True"] * 50})
    assert 0 < score < 0.2 and score.why == "its code took more than total_seconds for all tests"
    assert time.monotonic() - began < 8, "50 tests would take 10"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can read what no other user can")
def test_code_of_root_reads_no_file_of_root_or_is_told_to(tmp_path, monkeypatch, capsys):
    """It runs as nobody where nobody can read Python; elsewhere a line says that it stays root."""
    secret = tmp_path / "secret"
    secret.write_text("1")
    secret.chmod(0o600)
    monkeypatch.setattr(sandbox, "_told", set())
    reads = FAST(block(f"x = open({str(secret)!r}).read()"), {"tests": ["assert x == '1'"]})
    is_told = "it can read what root can" in capsys.readouterr().out
    assert (reads == 1) == is_told


def test_where_the_kernel_refuses_namespaces_no_code_runs_and_the_error_says_why(monkeypatch, tmp_path, places):
    """Without a process namespace a fork bomb cannot be ended: one filled a whole machine with processes."""
    refused = Path(sandbox.RUNNER).read_text().replace("libc.unshare(", "(lambda flags: ctypes.set_errno(1) or 1)(")
    assert refused != Path(sandbox.RUNNER).read_text()
    (tmp_path / "sandbox.py").write_text(refused)
    monkeypatch.setattr(sandbox, "RUNNER", str(tmp_path / "sandbox.py"))
    source = f"open({str(places.outside / 'new')!r}, 'w').write('x')"
    with pytest.raises(RuntimeError, match=r"this kernel refuses namespaces \(unshare: Operation not permitted\)"):
        FAST(block(source), {"tests": ["assert True"]})
    assert not places.processes() and [file.name for file in places.outside.iterdir()] == ["kept"]
